"""The scoring process of a node that SIGKILL ended ends itself, idle, asleep or busy."""

import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

PARENT = """
    import asyncio, sys
    from ftis_node.tasks.scorer import IsolatedScorer, ScoringLimits
    from tests.tasks.hostile_task import HostileTask

    async def main():
        task = HostileTask()
        scorer = IsolatedScorer(task, limits=ScoringLimits(time_limit_s=1))
        (inverse, _), = await scorer.score(task[0], ["pid"])
        print(round(1 / inverse), flush=True)
        await scorer.score(task[0], [sys.argv[1]])
        await asyncio.sleep(600)

    if __name__ == "__main__":
        asyncio.run(main())
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("text", ["1", "stuck"])
def test_the_process_ends_after_its_parent_is_killed(tmp_path, text):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as parent:
        assert parent.stdout
        worker = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.3)
        parent.kill()
    _, alive = psutil.wait_procs([worker], timeout=60)  # a process in C code ends after 3 s of processor time
    for process in alive:
        process.kill()
    assert not alive
