"""How much the property tests try: some in `make test`, much in `make test-long`, which runs them again."""

from hypothesis import settings

# Without a deadline: how long an example takes depends on what else the machine does.
settings.register_profile("suite", max_examples=50, deadline=None)
settings.register_profile("long", max_examples=500, deadline=None)
settings.load_profile("suite")
