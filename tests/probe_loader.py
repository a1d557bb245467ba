"""Launched by a test: writes the sample ids that the template's loader gives this process, `<out>/<rank>.json`."""

import json
import sys
from argparse import Namespace
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "scripts")]

from accelerate import Accelerator, DataLoaderConfiguration
from train_cifar import build_loaders

from utils.image_data import ImageData, synthetic_images

out, accumulation = Path(sys.argv[1]), int(sys.argv[2])
accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0)
)
data = synthetic_images(0, train=1000, test=10)
args = Namespace(batch_size=12, gradient_accumulation_steps=accumulation, num_workers=0)
loader = accelerator.prepare(build_loaders(accelerator, ImageData(data.train, data.test, []), args)[0])
epochs = []
for epoch in range(2):
    loader.set_epoch(epoch)
    epochs.append([batch["ids"].tolist() for batch in islice(loader, 1000 // 12 * accumulation)])
(out / f"{accelerator.process_index}.json").write_text(json.dumps(epochs))
accelerator.end_training()
