"""How kernels are compiled."""

from pathlib import Path

import pytest

from workers.engine.kernels import compiled


@pytest.mark.parametrize("place", ["file", "nowhere"])
def test_without_a_place_for_a_cache_kernels_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    if place == "file":
        monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "file"))
    else:
        monkeypatch.setattr(compiled, "cache_dir", Path("~nobody-of-this-name").expanduser)
    kernel = compiled.compiled("test", lambda x: x + 1)
    assert kernel(2) == 3
    assert sum(kernel.stats.cache_hits.values()) == 0
    assert kernel.stats.cache_path is None
