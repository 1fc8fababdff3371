"""Checks before a run: which check runs when.

==========================================  ==========  =============  ==============  ===============
what (module)                               ``doctor``  ``preflight``  start of a run  ``claim``
==========================================  ==========  =============  ==============  ===============
versions (:mod:`.doctor`)                   fail        fail           fail            fail
plugin, patches, platform (:mod:`.doctor`)  fail        fail, last     fail, as far    -
                                                                       as applied
options and combinations (``preflight/``    -           fail           fail            fail
config_checks, values, :mod:`.combinations`)
files (datasets, components)                -           fail           fail            fail, not for data
GPUs, memory, disk (machine_checks)         -           warn or fail   warn or fail    warn or fail
another run's folder (run_folder)           -           fail           fail            fail, and marks it
a run in the same folder (:mod:`.run_lock`) -           warn           fail, and locks fail, and locks
==========================================  ==========  =============  ==============  ===============

``preflight --dry-run`` is for another machine: what depends on this machine warns, as where a Ray cluster runs.
``claim`` checks with ``--check``, before the run script makes the data. ``SKIP_PREFLIGHT=1`` leaves out files, sizes
and memory at the start. Without rhyme, only settings that require it are refused. Sizes that are estimates warn.

Process: the command's, verl's driver at its start, the trainer. Engines: verl, vllm.
"""
