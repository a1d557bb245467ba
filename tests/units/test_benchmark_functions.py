"""Functions of the benchmarks: what they count and write, not how fast anything is."""

import pytest
import torch
from harness.launches import load_script

peers, records = map(load_script, ("peers", "records"))


def test_counts_the_operations_of_a_step():
    """Without the gradient of the images; that of the bias takes no product."""

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.whiten = torch.nn.Conv2d(3, 10, 1)

        def forward(self, images):
            return self.whiten(images).mean((2, 3))

    def build():
        model = Tiny()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    forward = 2 * 16 * 8 * 8 * 3 * 10
    assert records.step_flops(build, 16, 8) == 2 * forward
    assert records.evaluation_flops(4) == 4 * records.evaluation_flops(1) > 0
    # As published: steps of an epoch, of the training, and those that train the first layer's bias.
    assert records.record_steps(50_000) == (25, 200, 75)


@pytest.mark.parametrize(
    "begin", ["step ", "Train: 0 [", "Epoch: [0]  ["], ids=["ours", "timm", "torchvision"]
)
def test_the_first_steps_of_any_script(begin, tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text(f"for i in range(6): print('{begin}', i, '/9 (100%)', sep='', flush=True)")
    found = peers.measure("{stub}", 6, stub=stub)
    assert found["speed"] > 0 and found["start"] > 0
    with pytest.raises(RuntimeError, match="ended after 6 of 7 steps"):
        peers.measure("{stub}", 7, stub=stub)
