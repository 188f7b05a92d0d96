"""An agent of openai-agents with a tool, unchanged, over /v1/responses. It runs in the environment of `make conformance`."""

import json
import subprocess
from pathlib import Path

import pytest

from engine.core.types import Request
from tests.conformance.served import MODEL, app_of, served
from tests.conformance.test_tools import TOOLS
from tests.fake_engine import FakeEngine
from tests.tokenizers_for_tests import calling

PROGRAM = Path(__file__).parent / "agents_run.py"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
TOKENIZER = calling(False)


def _script(request: Request) -> list[int]:
    """Call the tool, then answer with what the tool returned."""
    prompt = str(TOKENIZER.decode(request.prompt_ids))
    text = "It is wet." if "rain in Oslo" in prompt else CALL
    return list(TOKENIZER.encode(text + "<|end|>"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_calls_its_tool_and_answers() -> None:
    python = TOOLS / "python"
    if not python.exists() or subprocess.run([python, "-c", "import agents"], capture_output=True, check=False).returncode:
        pytest.skip("openai-agents is not installed: `make conformance` does")
    end = TOKENIZER.convert_tokens_to_ids("<|end|>")
    engine = FakeEngine(script=_script, chunks=(1, 3), vocab_size=402, max_model_len=2000, eos_token_ids=(end,))
    with served(app_of(engine, TOKENIZER)) as url:
        command = [str(python), str(PROGRAM), url + "/v1", MODEL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout)
    assert found == {"called": ["Oslo"] * 3, "texts": ["It is wet."] * 3, "ends": ["response.completed"] * 2}
    assert len(engine.requests) == 6
    assert engine.requests[1].prompt_ids == engine.requests[3].prompt_ids == engine.requests[5].prompt_ids
