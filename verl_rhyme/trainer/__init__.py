"""The trainers: verl's, with recording, and the pipeline's.

Process: the trainer. Engines: verl, ray.
"""

import verl.trainer.ppo.v1  # noqa: F401  first: once it is there, the plugin imports our registry, and that all of us
