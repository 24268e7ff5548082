"""The numerical conformance suite: what a backend must pass before it counts as working."""
