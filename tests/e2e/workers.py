"""vLLM's worker once for each of our extensions.

vLLM adds the extension to the bases of its worker class. That lasts as long as the process, and a second extension with
the same methods is refused.
"""

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

NAME = "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
Worker = resolve_obj_by_qualname(NAME)


class WithMethods(Worker):
    """For RhymeWorkerMethods."""


class WithExtension(Worker):
    """For RhymeWorkerExtension, which has verl's methods, too."""
