"""Acme, an accelerator that exists only here: a backend for Octavo that uses nothing but its public surface."""
