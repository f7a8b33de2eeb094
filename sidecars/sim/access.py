"""Who may call what: SGLang's two keys, decided without IO."""

from __future__ import annotations

import hmac

OPEN_PREFIXES = ("/health", "/ready", "/metrics")


def allowed(
    method: str,
    path: str,
    authorization: str | None,
    *,
    api_key: str | None,
    admin_key: str | None,
    admin_route: bool,
) -> bool:
    """Whether a request may pass.

    Health, readiness and metrics are open. Admin routes want the admin key when there is one, else the API
    key; everything else wants the API key when there is one.
    """
    if method == "OPTIONS" or path.startswith(OPEN_PREFIXES):
        return True
    wanted = admin_key or api_key if admin_route else api_key
    if not wanted:
        return True
    scheme, _, given = (authorization or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), wanted.encode())
