"""What libraries would send, fetch or ask outside by themselves, and the variables that forbid it.

A node speaks to its peers, to the hub for a model or a data set that its operator named, and to trackers that its
operator asked for. Libraries read these variables when they are imported, and every process that a node starts inherits
its environment, so they are set once, before anything else. They go before what the environment says.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import MutableMapping

NO_TELEMETRY: Final = {
    "DO_NOT_TRACK": "1",  # the general wish; vLLM, huggingface_hub and others heed it
    "VLLM_NO_USAGE_STATS": "1",  # vLLM's report on machine and model at each start
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, transformers, datasets: versions of libraries in each request
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "DISABLE_SAFETENSORS_CONVERSION": "1",  # transformers asks a service to convert a model's pickled weights
    "USE_HUB_KERNELS": "0",  # transformers fetches compiled kernels, which is code
    "RAY_USAGE_STATS_ENABLED": "0",  # where vLLM runs on Ray
    "GRADIO_ANALYTICS_ENABLED": "False",  # under trackio
    "WANDB_ERROR_REPORTING": "false",  # wandb sends figures where it is asked to; never its own crashes
    "OTEL_SDK_DISABLED": "true",  # traces of vLLM
}

# A worker's model was found, and fetched where need be, before the worker was started.
WORKERS_STAY_OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}


def forbid_telemetry(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables for this process and for all that it will start."""
    environment.update(NO_TELEMETRY)
