"""`python -m vllm.entrypoints.openai.api_server --model MODEL …`, as KServe's presets start a server."""

import sys

from octavo_vllm_alias.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
