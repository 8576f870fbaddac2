"""Routing at scale on a request trace, in virtual time. docs/simulator.md says what is real and what is a model."""
