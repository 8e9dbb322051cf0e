"""Problems with verifiable rewards, one file a task. Importing this package loads no task and no library of one."""

from __future__ import annotations

from ftis_node.tasks.base import ChatMessage, Task, TaskItem, grader_releases
from ftis_node.tasks.registry import held_out_spec, load_task
from ftis_node.tasks.spec import TaskPart, TaskSpec, is_domain, parse_parts, parse_spec, validated_domain

__all__ = [
    "ChatMessage",
    "Task",
    "TaskItem",
    "TaskPart",
    "TaskSpec",
    "grader_releases",
    "held_out_spec",
    "is_domain",
    "load_task",
    "parse_parts",
    "parse_spec",
    "validated_domain",
]
