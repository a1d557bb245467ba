"""--push_to_hub asks for a token before it begins, and without a network costs a warning."""

import json

from harness.launches import GPT, run

SMALL = (
    "--dataset synthetic --n_layer 1 --n_head 1 --n_embd 8 --block_size 8 --batch_size 4 "
    "--max_train_steps 2 --push_to_hub me/model"
)


def test_a_run_without_a_token_ends_before_anything_is_written(tmp_path):
    environment = {"HF_TOKEN": "", "HF_HOME": str(tmp_path / "hf")}
    done = run(None, GPT, SMALL, output_dir=tmp_path / "out", check=False, env=environment)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.splitlines()[-1].startswith(
        "error: --push_to_hub me/model needs a token of the Hub: run `hf auth login`"
    )


def test_without_a_network_the_run_is_complete_and_can_be_uploaded_later(tmp_path):
    """Nothing listens on port 9. The same command tries again, although the run has finished."""
    environment = {"HF_TOKEN": "hf_x", "HF_ENDPOINT": "http://127.0.0.1:9"}
    for says in ("done", "already finished"):
        done = run(None, GPT, SMALL, output_dir=tmp_path / "out", env=environment)
        start = "warning: could not upload to me/model"
        warnings = [line for line in done.stderr.splitlines() if line.startswith(start)]
        assert says in done.stdout and len(warnings) == 1
        assert f"hf upload me/model {tmp_path / 'out'}" in warnings[0]
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "finished"
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\nlibrary_name: pytorch\n")
