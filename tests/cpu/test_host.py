"""What the host says of its processor."""

from octavo.backends.cpu.host import cpu_name


def test_cpu_name(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nmodel name\t: Fast Chip 9 @ 3GHz\n")
    assert cpu_name(tmp_path) == "Fast Chip 9 @ 3GHz"
    assert cpu_name(tmp_path / "nowhere")
