"""What runs on compute nodes: the node daemon, the engine owner, the admission guard, the simulated engine."""
