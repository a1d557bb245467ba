"""Compares the images per second of this input pipeline and of the usual one, in turn on the same cores.

    python tests/bench_input.py

The usual one: a torchvision data set with per-sample transforms (crop, flip, cutout, normalize) behind a DataLoader
with two workers. Ours: `BatchedImages` and `augment` with the same operations. Both start from decoded images.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torchvision.transforms as T
from PIL import Image
from torch.utils.data import DataLoader, Dataset

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from utils.augment import augment, normalize
from utils.image_data import BatchedImages, Split, as_is

COUNT, BATCH = 20_000, 1000


class PerSample(Dataset):
    """Decoded PIL images, transformed one by one, like torchvision's CIFAR10 data set."""

    def __init__(self, images):
        self.images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
        steps = [T.RandomCrop(32, padding=4, padding_mode="reflect"), T.RandomHorizontalFlip(), T.ToTensor()]
        steps += [T.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)), T.RandomErasing(1.0, (1 / 16, 1 / 16), (1, 1))]
        self.transform = T.Compose(steps)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), 0


def usual(dataset):
    return sum(len(images) for images, _ in DataLoader(dataset, BATCH, shuffle=True, num_workers=2))


def ours(dataset, mean, std):
    seen = 0
    for batch in DataLoader(dataset, BATCH, shuffle=True, collate_fn=as_is):
        images, keep = augment(batch["images"], batch["ids"], 0, 0, padding=4, cutout=8)
        seen += len(normalize(images, mean, std, keep))
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often to measure each pipeline")
    args = parser.parse_args()
    torch.set_num_threads(2)
    images = torch.randint(0, 256, (COUNT, 3, 32, 32), dtype=torch.uint8)
    per_sample, batched = PerSample(images), BatchedImages(Split(images, torch.zeros(COUNT, dtype=torch.int64)))
    mean, std = torch.tensor([125.0, 123.0, 114.0]), torch.tensor([63.0, 62.0, 67.0])
    speeds = {"usual": [], "ours": []}
    for _ in range(args.rounds):
        for name, load in (("usual", lambda: usual(per_sample)), ("ours", lambda: ours(batched, mean, std))):
            start_time = time.perf_counter()
            seen = load()
            speeds[name].append(seen / (time.perf_counter() - start_time))
    for name, values in speeds.items():
        print(f"{name:6} {statistics.median(values):10,.0f} images/s   (of {', '.join(f'{v:,.0f}' for v in values)})")
    ratios = [b / a for a, b in zip(speeds["usual"], speeds["ours"], strict=True)]
    print(f"ratio  {statistics.median(ratios):10.1f}            (of {', '.join(f'{r:.1f}' for r in ratios)})")


if __name__ == "__main__":
    main()
