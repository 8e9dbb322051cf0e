"""Environment variables that stop libraries from contacting other services by themselves.

A node contacts its peers, the hub for a model or data set that its operator named, and trackers that its operator
configured. Libraries read these variables at import, and a node's child processes inherit its environment. So the
variables are set once, before anything else. They override the user's environment.
"""

from __future__ import annotations

from typing import Final

NO_TELEMETRY: Final = {
    "DO_NOT_TRACK": "1",  # a convention; vLLM, huggingface_hub and others follow it
    "VLLM_NO_USAGE_STATS": "1",  # vLLM's report on machine and model at each start
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, transformers, datasets: versions of libraries in each request
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "DISABLE_SAFETENSORS_CONVERSION": "1",  # transformers asks a service to convert a model's pickled weights
    "USE_HUB_KERNELS": "0",  # transformers fetches compiled kernels, which is code
    "RAY_USAGE_STATS_ENABLED": "0",  # if vLLM runs on Ray
    "GRADIO_ANALYTICS_ENABLED": "False",  # trackio uses gradio
    "WANDB_ERROR_REPORTING": "false",  # wandb may send metrics, never its own crashes
    "OTEL_SDK_DISABLED": "true",  # traces of vLLM
}

# The daemon downloads a model before it starts a worker.
WORKERS_STAY_OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}
