"""One config from four layers, and `explain-config`, which tells them apart."""

import pytest

from octavo.core.base.config import EngineConfig, ServeConfig
from octavo.core.base.errors import ConfigError
from octavo.core.base.options import options_of
from octavo.core.cli import explain_config
from octavo.core.cli.flags import add_config_flags, add_model, engine_config, serve_config, settings
from octavo.core.cli.main import main
from octavo.core.cli.parser import Parser


def parse(*words, required=False):
    parser = Parser("octavo test", None)
    add_model(parser, required=required)
    add_config_flags(parser, EngineConfig)
    add_config_flags(parser, ServeConfig)
    return parser.parse(words)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_layers_win_in_order(yaml_file):
    path = yaml_file("model: from-file\nmax-num-seqs: 1\nblock_size: 32\ndtype: bfloat16\nport: 9000\n")
    environ = {"OCTAVO_MAX_NUM_SEQS": "2", "OCTAVO_BLOCK_SIZE": "64"}
    found = settings(EngineConfig, parse("--config", path, "--max-num-seqs", "3"), environ)
    assert found["max_num_seqs"] == (3, "--max-num-seqs")
    assert found["block_size"] == (64, "OCTAVO_BLOCK_SIZE")
    assert found["dtype"] == ("bfloat16", path)
    assert found["model"] == ("from-file", path)
    assert found["seed"] == (0, "default")
    assert "port" not in found


def test_flags_are_typed():
    config = engine_config(
        parse("m", "--kv-cache-memory-bytes", "1GiB", "--no-enable-prefix-caching", "--backend-option", "isa=avx2")
    )
    assert config.model == "m"
    assert config.kv_cache_memory_bytes == 1 << 30
    assert config.enable_prefix_caching is False
    assert config.backend_options == {"isa": "avx2"}


def test_repeated_backend_options_add_up():
    assert engine_config(parse("m", "--backend-option", "a=1", "--backend-option", "b=2")).backend_options == {
        "a": "1",
        "b": "2",
    }


def test_every_option_has_its_flag():
    args = vars(parse("m"))
    assert args == {"model": "m", "config": None}  # nothing is set by default, so nothing hides a lower layer
    for item in options_of(EngineConfig).values():
        if item.name != "model":
            assert item.flag.startswith("--")


def test_server_settings(yaml_file):
    config = serve_config(parse("m", "--config", yaml_file("port: 9000\nmodel: x\n"), "--host", "::1"))
    assert (config.host, config.port) == ("::1", 9000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("blok_size: 3", "unknown key 'blok_size'; did you mean 'block_size'?"),
        ("block_size: [1]", "give a whole number"),
        ("- a\n- b", "key: value"),
        ("a: b: c", "not a YAML file"),
        ("!!python/object/apply:os.getcwd []", "not a YAML file"),
    ],
)
def test_a_wrong_file_is_refused(yaml_file, text, words):
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")) as caught:
        engine_config(parse("m", "--config", yaml_file(text)))
    assert "settings.yaml" in str(caught.value)


def test_an_empty_file_sets_nothing(yaml_file):
    assert engine_config(parse("m", "--config", yaml_file("# nothing\n"))) == EngineConfig(model="m")


def test_explain_config_shows_sources(capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_NUM_THREADS", "3")
    assert main(["explain-config", "m", "--dtype", "float32"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["model"] == ["m", "MODEL"]
    assert rows["dtype"] == ["float32", "--dtype"]
    assert rows["num_threads"] == ["3", "OCTAVO_NUM_THREADS"]
    assert rows["max_model_len"] == ["(open)", "default"]
    assert rows["port"] == ["8000", "default"]


def test_explain_config_tells_each_meaning(capsys):
    assert main(["explain-config", "--verbose"]) == 0
    shown = capsys.readouterr().out
    for config_class in explain_config.CONFIGS:
        for item in options_of(config_class).values():
            assert item.help in shown
            assert item.env in shown
