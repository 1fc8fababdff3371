import verl.trainer.ppo.v1  # noqa: F401  first: once it is there, the plugin imports our registry, and that all of us
