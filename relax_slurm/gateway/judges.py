"""Which judges are rendered for on this machine, and what is done when one cannot be."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import monotonic

from relax_slurm.gateway.judge import Question
from relax_slurm.gateway.render_frames import Task
from relax_slurm.gateway.render_pool import CannotRender, RenderLimits, RenderPool
from relax_slurm.gateway.sources import RenderSource

log = logging.getLogger(__name__)
LOOK_AGAIN_SECONDS = 300.0
"""How long a judge whose folder could not be used is left to its engine before the folder is looked at again."""


class Judges:
    """The judges of a run. A judge that is not in `sources`, or has a reason there, is left to its engine."""

    def __init__(self, sources: Mapping[str, RenderSource | str], limits: RenderLimits | None = None) -> None:
        self._sources = {name: source for name, source in sources.items() if isinstance(source, RenderSource)}
        self._unusable: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._pool = RenderPool(limits)
        for name, source in sources.items():
            if isinstance(source, RenderSource):
                log.info("genrm model %s: messages are rendered here, with %s", name, source.folder)
            else:
                self._leave(name, source)

    def source(self, model: str) -> RenderSource | None:
        """What to render the model's messages with; None when its engine has to."""
        source = self._sources.get(model)
        until = self._unusable.get(model)
        if source is None or (until is not None and monotonic() < until):
            return None
        return source

    async def ids(self, model: str, source: RenderSource, question: Question) -> bytes | None:
        """JSON list of the question's token ids, None when the engine has to render it.

        BadRequest when the template refuses the messages, and the errors of `RenderPool.render`.
        """
        variables = question.chat_template_kwargs
        task = Task(source, bytes(question.messages), b"{}" if variables is None else bytes(variables))
        try:
            rendered = await self._pool.render(task)
        except CannotRender as error:
            self._unusable[model] = monotonic() + LOOK_AGAIN_SECONDS
            self._leave(model, str(error))
            return None
        self._unusable.pop(model, None)
        return rendered.ids

    async def close(self) -> None:
        """End the renderer processes."""
        await self._pool.close()

    def _leave(self, model: str, reason: str) -> None:
        if self._reasons.get(model) != reason:
            self._reasons[model] = reason
            log.warning("genrm model %s: messages are rendered by its engine's chat route: %s", model, reason)
