"""A simulated engine that speaks SGLang's HTTP: `python -m sidecars.sim`.

It needs no GPU and no model, answers deterministically, takes GPU memory from the node's ledger, and dies of
the requests that kill a real engine. `protocol` is pure, `model` makes up the answers, `scheduler` owns what
is in flight, `server` speaks HTTP.
"""
