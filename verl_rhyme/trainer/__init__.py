"""The trainers: verl's trainers with recording, and the pipeline's.

Process: the trainer. Engines: verl, ray.
"""

import verl.trainer.ppo.v1  # noqa: F401  first: it loads the plugin, whose registry imports the rest of this package
