"""A renderer process: reads tasks from standard input, writes token ids to standard output, ends with its gateway.

`python -m relax_slurm.gateway.render_worker`. A process and not a thread, because a template is a program that came
with a model: Python cannot stop a thread that loops, and such a thread would share the interpreter with the gateway.
A process can be killed, and may be given only so much memory.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from relax_slurm.gateway import render_frames as frames
from relax_slurm.gateway.model_folder import Unusable
from relax_slurm.gateway.render import Renderer, Renderers
from relax_slurm.gateway.template import Refused
from relax_slurm.wire.parent import end_with_parent

_Messages = list[dict[str, object]]
_decode_messages = msgspec.json.Decoder(_Messages).decode
_decode_variables = msgspec.json.Decoder(dict[str, object]).decode
_encode_ids = msgspec.json.Encoder().encode


def serve(tasks: BinaryIO, answers: BinaryIO) -> None:
    """Answer tasks until there are no more."""
    renderers = Renderers()
    while True:
        header = tasks.read(frames.HEADER_BYTES)
        if len(header) < frames.HEADER_BYTES:
            return
        task = frames.decode_task(tasks.read(int.from_bytes(header, "big")))
        try:
            renderer = renderers.get(task.source)
            _say(answers, frames.Loaded())
            result: frames.Answer = _render(renderer, task)
        except Unusable as error:
            result = frames.NoRenderer(str(error))
        except Refused as error:
            result = frames.Refusal(str(error))
        _say(answers, result)


def _render(renderer: Renderer, task: frames.Task) -> frames.Rendered:
    try:
        messages = _decode_messages(task.messages)
        variables = _decode_variables(task.chat_template_kwargs)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"messages or chat_template_kwargs: {error}") from None
    ids = renderer.render(messages, True, variables)
    return frames.Rendered(_encode_ids(ids), len(ids))


def _say(answers: BinaryIO, answer: frames.Answer) -> None:
    answers.write(frames.framed(answer))
    answers.flush()


def main() -> None:
    """Entry point; the argument is how many bytes of address space the process may have."""
    end_with_parent(signal.SIGKILL)  # in the middle of a loop it would not listen to anything else
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a library prints must not get between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
