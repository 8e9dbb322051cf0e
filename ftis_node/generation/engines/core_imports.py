"""What the fork server of vLLM's engine core imports (`core_process.py`). Importing this ends it with its parent."""

from ftis_node.generation.engines.core_process import SERVER
from ftis_node.workers.liveness import die_with_parent
from ftis_node.workers.quick_imports import import_quickly

die_with_parent()
import_quickly("vllm.v1.engine.core", "vllm.v1.executor", without=SERVER)
