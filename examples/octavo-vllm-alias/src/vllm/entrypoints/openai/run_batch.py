"""`python -m vllm.entrypoints.openai.run_batch -i IN -o OUT --model MODEL …`."""

import sys

from octavo_vllm_alias.main import main

if __name__ == "__main__":
    sys.exit(main(["run-batch", *sys.argv[1:]]))
