"""Proves the tests: makes one wrong edit at a time in a copy of the project, and fails if the tests
named for it pass.

python tests/mutants.py               # all of them, two at a time; prints a table with the test that noticed each
python tests/mutants.py guard plan    # those whose name or file contains one of the words
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import warm

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600
SKIPPED = "skipped here, as its tests are"  # they need SLURM, say
LEFT_OUT = "left out, because this machine is slow"
BEGIN_UNTIL = float(
    os.environ.pop("BEGIN_UNTIL", "inf")
)  # see .ci/run; tests of an edit that has begun are all run


class Mutant(NamedTuple):
    """`old`, which stands once in `file`, becomes `new`; `tests`: what pytest is told to run."""

    name: str
    file: str
    old: str
    new: str
    tests: str


CIFAR, GPT, MINIMAL = "scripts/train_cifar.py", "scripts/train_gpt.py", "scripts/train_minimal.py"
PARALLEL, IMAGES = "scripts/train_model_parallel.py", "scripts/train_images.py"
SAME_SAMPLES = "test_train_cifar.py -k every_step_sees_the_same_samples"
TWO_AS_ONE = "test_train_cifar.py -k two_processes_compute_what_one_does"
EXACT_METRICS = "test_train_cifar.py -k metrics_are_exact"
STREAM_KILLED = "test_gpt.py -k streaming_killed"
BAD_INPUT = "test_train_cifar.py -k bad_input"

MUTANTS = [
    # ------------------------------------------------------------------------------------- samples and their order
    Mutant(
        "every epoch in the order of the first",
        CIFAR,
        "train_loader.set_epoch(epoch)",
        "pass",
        SAME_SAMPLES,
    ),
    Mutant(
        "the same in the GPT",
        GPT,
        "loader.set_epoch(epoch)",
        "pass",
        "test_gpt.py -k every_epoch_reads",
    ),
    Mutant(
        "every epoch cut at the same place",
        GPT,
        "set_offset(epoch)",
        "set_offset(0)",
        "test_gpt.py -k every_epoch_reads",
    ),
    Mutant(
        "skipping ignores accumulation",
        "utils/run/plan.py",
        "done * self.accumulation, self",
        "done, self",
        SAME_SAMPLES,
    ),
    Mutant(
        "nothing is skipped",
        CIFAR,
        "skip_first_batches(train_loader, skip) if skip else train_loader",
        "train_loader",
        SAME_SAMPLES,
    ),
    Mutant(
        "batch norm of each process",
        "utils/run/ddp.py",
        "not all(norm.training for norm in norms)",
        "False",
        EXACT_METRICS,
    ),
    Mutant(
        "buffers broadcast in every step",
        "utils/run/ddp.py",
        "not all(norm.training for norm in norms)",
        "True",
        "test_mechanisms.py -k ddp_broadcasts",
    ),
    Mutant(
        "other buffers are not broadcast",
        "utils/run/ddp.py",
        "DistributedDataParallel) and only_norms",
        "DistributedDataParallel)",
        "test_mechanisms.py -k ddp_broadcasts",
    ),
    Mutant(
        "a notebook keeps every run",
        "utils/run/process.py",
        "if _handles_signals:",
        "if True:",
        "test_mechanisms.py -k garbage",
    ),
    Mutant(
        "batch size per process",
        "utils/run/launch.py",
        "split_batches=True",
        "split_batches=False",
        TWO_AS_ONE,
    ),
    Mutant(
        "no seedable sampler",
        "utils/run/launch.py",
        "use_seedable_sampler=True",
        "use_seedable_sampler=False",
        SAME_SAMPLES,
    ),
    Mutant(
        "augmentation ignores the epoch",
        CIFAR,
        'batch["ids"], epoch,',
        'batch["ids"], 0,',
        SAME_SAMPLES,
    ),
    Mutant(
        "augmentation ignores the sample",
        CIFAR,
        'augment(images, batch["ids"]',
        "augment(images, torch.arange(len(images))",
        SAME_SAMPLES,
    ),
    Mutant("augmentation ignores the seed", CIFAR, "epoch, args.seed", "epoch, 0", SAME_SAMPLES),
    Mutant(
        "all of augmentation's numbers alike",
        "utils/data/augment.py",
        "for value in (seed, epoch, stream, ids)",
        "for value in (seed, epoch, ids)",
        "test_mechanisms.py -k random_numbers",
    ),
    Mutant(
        "mirroring does not alternate",
        "utils/data/augment.py",
        "ids, 2) + epoch) % 2",
        "ids, 2)) % 2",
        "test_mechanisms.py -k mirror",
    ),
    Mutant(
        "a stream forgets its position", GPT, 'run.progress.get("position")', "None", STREAM_KILLED
    ),
    Mutant(
        "a buffer is read from its start",
        "utils/data/text_stream.py",
        'range(start["taken"], self.buffer)',
        "range(0, self.buffer)",
        "test_gpt.py -k any_number_of_processes_streams",
    ),
    Mutant(
        "held-out text is trained on",
        "utils/data/text_stream.py",
        "if self.use_all or not held_out(document):",
        "if True:",
        "test_gpt.py -k never_shows",
    ),
    # ---------------------------------------------------------------------------------------------- images, workers
    Mutant(
        "an image is the same in every epoch",
        "utils/data/transforms.py",
        "sample_seed(self._seed, epoch, index)",
        "sample_seed(self._seed, 0, index)",
        "test_train_images.py -k depends_on_seed_epoch",
    ),
    Mutant(
        "images draw from one generator",
        "utils/data/transforms.py",
        "torch.default_generator.manual_seed(sample_seed",
        "id(sample_seed",
        "test_train_images.py -k depends_on_seed_epoch",
    ),
    Mutant(
        "checkpoints are uploaded",
        "utils/run/model_card.py",
        '"checkpoints/*", ',
        "",
        "test_model_card.py -k everything_but",
    ),
    Mutant(
        "shared memory is used again at once",
        "utils/data/shared_batches.py",
        "len(b) > size and not b[-1]",
        "len(b) > size",
        "test_train_images.py -k used_again_only",
    ),
    Mutant(
        "shared memory is never free again",
        "utils/data/shared_batches.py",
        "lent[1][-1] = 0",
        "lent[1][-1] = 1",
        "test_train_images.py -k used_again_only",
    ),
    Mutant(
        "the epoch does not travel with the index",
        "utils/data/loaders.py",
        "((self._epoch, index) for",
        "((0, index) for",
        "test_train_images.py -k an_epoch_has_each",
    ),
    Mutant(
        "skipped images are decoded",
        IMAGES,
        'loaders["rest"] = skip_first_batches(loader, skip)',
        "list(loader)[skip:]",
        "test_train_images.py -k skipping_decodes_nothing",
    ),
    Mutant(
        "partners are those of a process",
        "utils/data/mixing.py",
        "x.unflatten(0, (-1, 2)).transpose(0, 1)",
        "x.unflatten(0, (2, -1))",
        "test_train_images.py -k mixing_is",
    ),
    Mutant(
        "mixing draws from the generator of dropout",
        "utils/data/mixing.py",
        "torch.default_generator.manual_seed(sample_seed(self._seed, step, -2))",
        "pass",
        "test_train_images.py -k mixing_is",
    ),
    Mutant(
        "images are not centered",
        "utils/data/augment.py",
        ".mul_(scale).sub_(shift)",
        ".mul_(scale)",
        "test_train_images.py -k normalization",
    ),
    Mutant(
        "averaged weights are not saved",
        IMAGES,
        "accelerator.register_for_checkpointing(ema)",
        "pass",
        "test_train_images.py -k killed_mid_accumulation",
    ),
    Mutant(
        "frozen batch norm collects statistics",
        "utils/pretrained.py",
        "            module.eval()",
        "            pass",
        "test_train_images.py -k frozen_batch_norm",
    ),
    Mutant(
        "an unreadable image counts as a mistake",
        "utils/scores.py",
        "counts, hits = labels >= 0,",
        "counts, hits = labels >= -1,",
        "test_train_images.py -k bad_image_in_a_run",
    ),
    Mutant(
        "the last layer of other classes is kept",
        "utils/pretrained.py",
        '!= config["class_names"]:',
        "is None:",
        "test_train_images.py -k head_for_other_classes",
    ),
    Mutant(
        "a changed image stays in the cache",
        "utils/data/image_cache.py",
        "stamps=True",
        "stamps=False",
        "test_train_images.py -k cache_has_what",
    ),
    Mutant(
        "half a cache has its final name",
        "utils/data/image_cache.py",
        'file.with_name(f"{writer}{os.getpid()}"), []',
        "file, []",
        "test_train_images.py -k interrupted_cache",
    ),
    Mutant(
        "the split depends on where the folder is",
        "utils/data/sources.py",
        "train.portable_name",
        "train.name",
        "test_train_images.py -k splits_by_names",
    ),
    Mutant(
        "results on test data choose a checkpoint",
        "utils/data/sources.py",
        'if "val" not in splits and val_fraction > 0:',
        "if len(splits) == 1 and val_fraction > 0:",
        "test_sources.py -k choose_by_test_data",
    ),
    Mutant(
        "a changed table stays decoded",
        "utils/data/columns.py",
        'f"{table._fingerprint} {column}"',
        "column",
        "test_sources.py -k table_changes",
    ),
    Mutant(
        "a table with two columns of images is read by chance",
        "utils/data/columns.py",
        "if len(candidates) == 1:",
        "if candidates:",
        "test_sources.py -k told_apart",
    ),
    Mutant(
        "photos lie on their side",
        "utils/data/images.py",
        "if turn is not None else image",
        "if False else image",
        "test_train_images.py -k images_of_every_kind",
    ),
    # ------------------------------------------------------------------------- what a data set is
    Mutant(
        "any folder with a word like test in its name is a split",
        "utils/data/splits.py",
        "return None if others else split",
        "return split",
        "test_layouts.py -k names_of_splits",
    ),
    Mutant(
        "birds_train and birds_test are classes",
        "utils/data/splits.py",
        'if split and "train" in groups[others]',
        'if False and "train" in groups[others]',
        "test_layouts.py -k other_names",
    ),
    Mutant(
        "a stray image turns the splits into classes",
        "utils/data/image_folder.py",
        "folder.nested > folder.direct]",
        "not folder.direct]",
        "test_layouts.py -k strays",
    ),
    Mutant(
        "images without labels are trained on as classes",
        "utils/data/image_folder.py",
        "if len(flat) > 1 or (flat and not others):",
        "if False:",
        "test_layouts.py -k ambiguous",
    ),
    Mutant(
        "a class of unreadable files is dropped",
        "utils/data/image_folder.py",
        "if images or (folder and others):",
        "if False:",
        "test_layouts.py -k cannot_be_read",
    ),
    Mutant(
        "an unlabeled test split is an error",
        "utils/data/image_folder.py",
        'if split == "test" and _has_no_classes(scanner, folder):',
        "if False:",
        "test_layouts.py -k without_classes",
    ),
    Mutant(
        "thumbnails are images",
        "utils/data/scan.py",
        "if lower in FOREIGN or (",
        "if (",
        "test_layouts.py -k is_named",
    ),
    Mutant(
        "a looping link is followed for ever",
        "utils/data/scan.py",
        "if identity in above:",
        "if False:",
        "test_layouts.py -k loop",
    ),
    Mutant(
        "a FIFO counts as an image",
        "utils/data/scan.py",
        "if entry.is_file():",
        "if True:",
        "test_layouts.py -k never_opened",
    ),
    Mutant(
        "a device is read",
        "utils/data/scan.py",
        "if not stat.S_ISREG(os.fstat(descriptor).st_mode):",
        "if False:",
        "test_layouts.py -k became_a_device",
    ),
    Mutant(
        "a table names any file of the machine",
        "utils/data/storage.py",
        "if not any(file.is_relative_to(folder) for folder in self._allowed):",
        "if False:",
        "test_sources.py -k of_their_folder_only",
    ),
    Mutant(
        "the library's search for words splits tables",
        "utils/data/sources.py",
        "files = _table_files(path)",
        "files = None",
        "test_sources.py -k names_of_files",
    ),
    Mutant(
        "a file that may be of another split is trained on",
        "utils/data/tables.py",
        "    if None in found:\n",
        '    if None in found and "x" in found:\n',
        "test_sources.py -k tables_that_are_ambiguous",
    ),
    Mutant(
        "of two signs one is no class",
        "utils/data/labels.py",
        "        if not signs:\n",
        "        if True:\n",
        "test_sources.py -k every_value",
    ),
    Mutant(
        "measurements are classes",
        "utils/data/labels.py",
        "if not math.isfinite(v) or v != int(v)",
        "if not math.isfinite(v)",
        "test_sources.py -k that_are_no_classes",
    ),
    Mutant(
        "12 bits are near black",
        "utils/data/pixels.py",
        "scaling.get(kind) or DEFAULTS[kind]",
        "DEFAULTS[kind]",
        "test_pixels.py -k any_depth",
    ),
    Mutant(
        "what a file says of its values is not read",
        "utils/data/pixels.py",
        "if declared and _fits(",
        "if False and _fits(",
        "test_pixels.py -k any_depth",
    ),
    Mutant(
        "one broken pixel decides what is white",
        "utils/data/pixels.py",
        "OUTLIERS = (1e-4, 1 - 1e-4)",
        "OUTLIERS = (0, 1)",
        "test_pixels.py -k broken_pixel",
    ),
    Mutant(
        "a cache has the values of another scaling",
        "utils/data/images.py",
        'repr(self.scaling).encode() if self.scaling else b""',
        'b""',
        "test_pixels.py -k of_its_training",
    ),
    Mutant(
        "a changed image goes unnoticed",
        "utils/data/images.py",
        "digest.update(self.source.read(row, SAMPLED_BYTES))",
        "self.source.read(row, SAMPLED_BYTES)",
        "test_layouts.py -k tells_data_apart",
    ),
    Mutant(
        "damaged metadata hides an image",
        "utils/data/images.py",
        "repaired = pixel_values.without_damaged_metadata(data)",
        "repaired = data",
        "test_pixels.py -k damaged_metadata",
    ),
    Mutant(
        "all of a very long image is scaled",
        "utils/data/transforms.py",
        "if max(pixels.shape[1:]) > longest:",
        "if False:",
        "test_pixels.py -k very_long",
    ),
    Mutant(
        "images of other sizes lose their borders",
        "utils/data/arrays.py",
        "            return _resize(image)\n",
        "            return image.pixels()[:, :SIZE, :SIZE]\n",
        "test_pixels.py -k become_32",
    ),
    Mutant(
        "a byte order mark is text",
        "utils/data/text_files.py",
        "return data.removeprefix(codecs.BOM_UTF8)",
        "return data",
        "test_text.py -k byte_order",
    ),
    Mutant(
        "the end of the training text is held out instead of val",
        "utils/data/text.py",
        'texts["train"], texts.get("val")',
        'texts["train"], None',
        "test_text.py -k splits_of_text",
    ),
    Mutant(
        "texts that look like dates become dates",
        "utils/data/text_files.py",
        'True, list(row), {"reader": "text"}',
        "False, list(row), {}",
        "test_text.py -k looks_like_dates",
    ),
    Mutant(
        "a stream holds out a part of train instead of val",
        "utils/data/text_stream.py",
        'whole = "val" in table.splits',
        "whole = False",
        "test_text.py -k stream_trains",
    ),
    Mutant(
        "a run continues with other data",
        "utils/data/report.py",
        "    return data.description\n",
        '    return ""\n',
        "test_data_of_a_run.py -k same_data_only",
    ),
    Mutant(
        "only the held-out share of other data is scored",
        "scripts/evaluate.py",
        'if same or name == "synthetic" or data.description',
        "if True or data.description",
        "test_data_of_a_run.py -k scored_as_a_whole",
    ),
    # ------------------------------------------------------------------------------------------- what is computed
    Mutant(
        "attention in bf16 on a CPU",
        GPT,
        "torch.float32 if x.is_cpu else value.dtype",
        "value.dtype",
        "test_gpt.py -k attention",
    ),
    Mutant(
        "no seed for dropout",
        GPT,
        "seed_step(accelerator, args.seed, step, len(losses))",
        "pass",
        "test_gpt.py -k with_dropout",
    ),
    Mutant(
        "gradients are averaged over one micro-batch too few",
        "utils/run/launch.py",
        'getattr(args, "gradient_accumulation_steps", 1), sync',
        'max(1, getattr(args, "gradient_accumulation_steps", 1) - 1), sync',
        "test_train_cifar.py -k accumulation_changes_nothing",
    ),
    Mutant(
        "learning rate off by a step",
        CIFAR,
        "lr_multiplier(step, plan, args)\n    )",
        "lr_multiplier(step + 1, plan, args)\n    )",
        "test_train_cifar.py -k learning_rate",
    ),
    Mutant(
        "Muon: tall matrices move too little",
        "utils/muon.py",
        "max(1, shape[0] / shape[1:].numel()) ** 0.5",
        "1",
        "test_gpt.py -k tall_matrix",
    ),
    Mutant(
        "token shift shows the next byte",
        "scripts/train_gpt.py",
        "F.pad(x, (0, 0, back, 0))[:, : x.size(1)]",
        "F.pad(x, (0, 0, 0, back))[:, back:]",
        "test_gpt.py -k later_bytes",
    ),
    Mutant(
        "Muon: one iteration",
        "utils/muon.py",
        "range(iterations)",
        "range(1)",
        "test_gpt.py -k muon",
    ),
    Mutant(
        "Muon: wide matrices diverge",
        "utils/muon.py",
        "= factor @ gram @ factor",
        "= factor @ gram",
        "test_gpt.py -k muon",
    ),
    Mutant(
        "an evaluation repeats samples up to a full batch",
        "utils/data/loaders.py",
        "return math.ceil(samples / (batches * processes)) * processes",
        "return most * processes",
        "test_mechanisms.py -k even_batches",
    ),
    Mutant(
        "Muon: the scale of rows forgets",
        "utils/muon.py",
        "lerp_(squares, 1 - beta2)",
        "lerp_(squares, 1.0)",
        "test_gpt.py -k normalized_rows",
    ),
    Mutant(
        "Muon: normalized rows change less",
        "utils/muon.py",
        "norms.norm(dim=1, keepdim=True) / (norms",
        "1 / (norms",
        "test_gpt.py -k normalized_rows",
    ),
    Mutant(
        "Muon: rows are not normalized",
        "utils/muon.py",
        "if beta2:",
        "if False:",
        "test_gpt.py -k muon_with_beta2",
    ),
    Mutant(
        "Muon: momentum stays low",
        "utils/muon.py",
        'state["step"] += 1',
        "pass",
        "test_gpt.py -k muon",
    ),
    Mutant(
        "Muon: the rest is updated twice",
        "utils/muon.py",
        "weight.grad = None",
        "pass",
        "test_gpt.py -k muon",
    ),
    Mutant(
        "large tensors are mapped anew in every step",
        "utils/run/cpu.py",
        "libc.mallopt(mmap_max, 0)",
        "pass",
        "test_mechanisms.py -k reuses_the_memory",
    ),
    Mutant(
        "pixels are not centered",
        "utils/data/augment.py",
        ".sub_(shift.view(3, 1, 1))",
        "",
        "test_mechanisms.py -k cutout",
    ),
    Mutant(
        "buckets of gradients change after a restart",
        "utils/run/ddp.py",
        "for _ in range(2):",
        "for _ in range(0):",
        "test_faults.py -m slow -k any_number_of_processes",
    ),
    Mutant(
        "a stage works on what is not there yet",
        PARALLEL,
        "for stage in reversed(range(stages))",
        "for stage in range(stages)",
        "test_model_parallel.py -k schedule",
    ),
    Mutant(
        "padding counts in the loss",
        "utils/data/text.py",
        "len(self.text), -100)",
        "len(self.text), 0)",
        "test_gpt.py -k held_out_windows",
    ),
    # ------------------------------------------------------------------------------------------------------ figures
    Mutant(
        "loss of one rank",
        CIFAR,
        'accelerator.reduce(mean_loss, "mean").item()',
        "mean_loss.item()",
        TWO_AS_ONE,
    ),
    Mutant(
        "loss of one rank, minimal",
        MINIMAL,
        'accelerator.reduce(loss.detach(), "mean").item()',
        "loss.item()",
        "test_minimal.py -k whole_batch",
    ),
    Mutant("padding is scored", CIFAR, "gather_for_metrics(", "gather(", EXACT_METRICS),
    Mutant(
        "padding is scored, GPT",
        GPT,
        "gather_for_metrics(",
        "gather(",
        "test_gpt.py -k two_processes_compute",
    ),
    Mutant(
        "padding is scored, minimal",
        MINIMAL,
        "accelerator.gather_for_metrics(model",
        "accelerator.gather(model",
        "test_minimal.py",
    ),
    Mutant(
        "evaluation in train mode",
        CIFAR,
        "    model.eval()\n    outputs, labels",
        "    outputs, labels",
        EXACT_METRICS,
    ),
    Mutant(
        "evaluation in train mode, GPT",
        GPT,
        "    model.eval()\n    total, count",
        "    total, count",
        "test_gpt.py -k validation_loss",
    ),
    Mutant(
        "training in evaluation mode",
        GPT,
        "    model.train()\n    if count",
        "    if count",
        "test_gpt.py -k with_dropout",
    ),
    Mutant(
        "evaluate.py scores what was trained on",
        "scripts/evaluate.py",
        "split = data.splits[shown]",
        'split = data.splits["train"]',
        EXACT_METRICS,
    ),
    Mutant(
        "every process prints",
        "utils/run/launch.py",
        "    if not accelerator.is_main_process:",
        "    if False:",
        "test_train_cifar.py -k one_loss",
    ),
    Mutant(
        "training goes on in evaluation mode",
        CIFAR,
        "    model.train()\n    outputs, labels",
        "    outputs, labels",
        "test_train_cifar.py -k evaluation_changes_nothing",
    ),
    Mutant(
        "module. in the export",
        CIFAR,
        "accelerator.unwrap_model(model), config",
        "model, config",
        TWO_AS_ONE,
    ),
    Mutant(
        "a comparison with itself",
        "scripts/compare_ddp.py",
        "compare_pair(records[name], records[single])",
        "compare_pair(records[name], records[name])",
        "test_compare_ddp.py -k pairs",
    ),
    Mutant(
        "all-reduce sends once",
        "scripts/predict_scaling.py",
        "2 * (processes - 1) * latency",
        "(processes - 1) * latency",
        "test_predict_scaling.py -k all_reduce",
    ),
    # -------------------------------------------------------------------------------------------------- checkpoints
    Mutant(
        "checksums are not compared",
        "utils/run/manifest.py",
        'if (sizes[name], digest) != (files[name]["size"], files[name]["sha256"]):',
        'if sizes[name] != files[name]["size"]:',
        "test_faults.py -k damaged_checkpoint",
    ),
    Mutant(
        "the manifest's seal is not compared",
        "utils/run/manifest.py",
        'if manifest.pop("sha256", None) != _checksum(manifest):',
        'if not manifest.pop("sha256", None):',
        "test_faults.py -k damaged_checkpoint",
    ),
    Mutant(
        "files are not synced",
        "utils/run/manifest.py",
        "                sync(path)\n",
        "                pass\n",
        "test_mechanisms.py -k has_its_name",
    ),
    Mutant(
        "the manifest is not synced",
        "utils/run/manifest.py",
        "    sync(writing / MANIFEST)\n",
        "",
        "test_mechanisms.py -k has_its_name",
    ),
    Mutant(
        "the name is not synced",
        "utils/run/manifest.py",
        "    sync(target.parent)\n",
        "",
        "test_mechanisms.py -k has_its_name",
    ),
    Mutant(
        "the oldest checkpoint is continued",
        "utils/run/checkpoint.py",
        "all_in(folder)[::-1]",
        "all_in(folder)",
        "test_faults.py -k one_rank_killed",
    ),
    Mutant(
        "the best checkpoint is deleted",
        "utils/run/checkpoint.py",
        "if path != kept:",
        "if True:",
        "test_mechanisms.py -k best_are_kept",
    ),
    Mutant(
        "damaged checkpoints are kept",
        "utils/run/checkpoint.py",
        "in later + paths[:-keep]",
        "in paths[:-keep]",
        "test_faults.py -k later_damaged",
    ),
    Mutant(
        "registered pickles are let through",
        "utils/run/shards.py",
        "    torch.load = load\n",
        "",
        "test_faults.py -k registered",
    ),
    Mutant(
        "sharded pickles are let through",
        "utils/run/shards.py",
        "        module.FileSystemReader = Reader\n",
        "        pass\n",
        "test_faults.py -k poisoned_sharded",
    ),
    Mutant(
        "an index may name any class",
        "utils/run/shards.py",
        "if module == METADATA or name in KNOWN.get(module, ()):",
        "if True:",
        "test_faults.py -k poisoned_sharded",
    ),
    Mutant(
        "a full disk ends the run",
        "utils/run/checkpoint.py",
        "isinstance(error, (OSError, SafetensorError))",
        "False",
        "test_faults.py -k full_disk_costs",
    ),
    Mutant(
        "an index may name a file outside of the checkpoint",
        "utils/run/shards.py",
        "if not (beside and",
        "if not (True and",
        "test_faults.py -k poisoned_sharded",
    ),
    Mutant(
        "a folder that is not shared goes unnoticed",
        "utils/run/folder.py",
        "        run_on_all(self._accelerator, lambda: self.is_main or check_shared(self.path, "
        "owner))\n",
        "",
        "test_faults.py -k not_shared",
    ),
    Mutant(
        "machines may see different files",
        "utils/run/manifest.py",
        "if all(view == views[0] for view in views):",
        "if True:",
        "test_faults.py -k another_machine_does_not_see",
    ),
    Mutant(
        "folders of shards are not synced",
        "utils/run/manifest.py",
        'for path in [*folder.rglob("*"), folder]:',
        'for path in [*folder.glob("*.*"), folder]:',
        "test_mechanisms.py -k all_files_are_synced",
    ),
    Mutant(
        "metrics are not synced",
        "utils/run/metrics.py",
        "os.fsync(self._file.fileno())",
        "pass",
        "test_mechanisms.py -k metrics_before_a_checkpoint",
    ),
    Mutant(
        "an infinite gradient goes unnoticed until the next save",
        "utils/run/guard.py",
        "if norm is None or self._skips_infinite_gradients:",
        "if True:",
        "test_faults.py -m slow -k infinite_gradient",
    ),
    Mutant(
        "the gradient scaler of fp16 may not skip a step",
        "utils/run/guard.py",
        "accelerator.scaler is not None",
        "False",
        "test_faults.py -k gradient_scaler",
    ),
    Mutant(
        "persistent workers stay in the first epoch",
        "utils/data/text.py",
        "dtype=torch.int64).share_memory_()",
        "dtype=torch.int64)",
        "test_gpt.py -k persistent",
    ),
    Mutant(
        "Muon needs every gradient",
        "utils/muon.py",
        "if weight.grad is None:",
        "if False:",
        "test_gpt.py -k without_a_gradient",
    ),
    Mutant(
        "gloo listens on a loopback address",
        "utils/run/launch.py",
        'if not socket.gethostbyname(socket.gethostname()).startswith("127."):',
        "if True:",
        "test_mechanisms.py -k loopback",
    ),
    Mutant(
        "checkpoints may fail for ever",
        "utils/run/folder.py",
        "if self._failed_saves and self._failed_saves == self._args.max_failed_checkpoints:",
        "if False:",
        "test_faults.py -k keep_failing",
    ),
    Mutant(
        "NaN weights are saved",
        "utils/run/guard.py",
        "0 if weights_finite else",
        "0 if True else",
        "test_faults.py -k infinite_gradient",
    ),
    Mutant(
        "a checkpoint of NaN is continued",
        "utils/run/checkpoint.py",
        ".isfinite().all():",
        ".isfinite().any():",
        "test_faults.py -k passed_over",
    ),
    Mutant(
        "a step that diverged is saved",
        CIFAR,
        "guard.check(model)",
        "pass",
        "test_faults.py -k diverges_is_not_saved",
    ),
    Mutant(
        "nothing is saved on a signal",
        CIFAR,
        "if stop or plan.save_due",
        "if plan.save_due",
        "test_faults.py -k signal_to_one_rank",
    ),
    # -------------------------------------------------------------------------------------------------- the run's folder
    Mutant(
        "no lock",
        "utils/run/files.py",
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "test_faults.py -k second_job",
    ),
    Mutant(
        "a finished run is trained again",
        "utils/run/folder.py",
        'if earlier and status.read(self.path).get("state") == "finished":',
        "if False:",
        "test_faults.py -k finished_run",
    ),
    Mutant(
        "lines from after the resumed step stay",
        "utils/run/metrics.py",
        'if line["step"] <= step:',
        "if True:",
        "test_mechanisms.py -k cut_back",
    ),
    Mutant(
        "other arguments are not noticed",
        "utils/run/record.py",
        "if was != value and",
        "if False and",
        BAD_INPUT,
    ),
    Mutant(
        "a foreign folder is taken",
        "utils/run/claim.py",
        "if any(not entry.name.startswith(own)",
        "if False and any(not entry.name.startswith(own)",
        BAD_INPUT,
    ),
    # ----------------------------------------------------------------------------------------------- signals and deaths
    Mutant(
        "each process decides for itself when to stop",
        "utils/run/guard.py",
        "self._votes, dist.ReduceOp.MAX",
        "self._votes, dist.ReduceOp.MIN",
        "test_faults.py -k signal_to_one_rank",
    ),
    Mutant(
        "orphans live on",
        "utils/run/process.py",
        "threading.Thread(target=_exit_with_launcher, args=(os.getppid(),), daemon=True).start()",
        "pass",
        "test_faults.py -k launcher_killed",
    ),
    Mutant(
        "Ctrl-C ends loader workers",
        "utils/data/loaders.py",
        "signal.signal(signum, signal.SIG_IGN)",
        "signal.signal(signum, signal.SIG_DFL)",
        "test_faults.py -k SIGINT",
    ),
    Mutant(
        "one process has no time to save",
        "utils/run/process.py",
        "SAVE_SECONDS = 60",
        "SAVE_SECONDS = 1",
        "test_faults.py -k time_to_save",
    ),
    Mutant(
        "two processes have no time to save",
        "utils/run/guard.py",
        "            process.stopping_starts()\n        return bool(stop)",
        "            pass\n        return bool(stop)",
        "test_faults.py -m slow -k time_to_save",
    ),
    Mutant(
        "only the outer error is looked at",
        "utils/run/failures.py",
        "error = error.__cause__ or error.__context__",
        "error = None",
        "test_faults.py -k dead_loader_worker",
    ),
    Mutant(
        "garbage stays",
        "utils/run/process.py",
        "gc.enable()",
        "pass",
        "test_mechanisms.py -k garbage",
    ),
    Mutant(
        "garbage is kept for ever",
        "utils/run/process.py",
        "gc.collect()",
        "pass",
        "test_mechanisms.py -k garbage",
    ),
    Mutant(
        "NaN is a number",
        "utils/run/guard.py",
        "0 if math.isfinite(value) else step",
        "0",
        "test_faults.py -k diverged_loss",
    ),
    # ---------------------------------------------------------------------------------------------------- invalid input
    Mutant(
        "every process prints the error",
        "utils/run/process.py",
        "if rank_variable and int(os.environ.get(rank_variable, 0)) != 0:",
        "if False:",
        "test_train_cifar.py -k printed_once",
    ),
    Mutant(
        "every process that lost contact prints it",
        "utils/run/process.py",
        "    if not failures.record(line, retry):\n        return\n",
        "    failures.record(line, retry)\n",
        "test_faults.py -k lost_contact_report",
    ),
    Mutant(
        "processes that lost contact fail too",
        "utils/run/process.py",
        "_wait_for_launcher(5)",
        "pass",
        "test_faults.py -k lost_contact",
    ),
    Mutant(
        "the launcher of one process prints a traceback",
        "accelerate_configs/cpu.yaml",
        "quiet: true",
        "quiet: false",
        "test_train_cifar.py -k last_line",
    ),
    Mutant(
        "invalid input ends with 1",
        "utils/run/process.py",
        "1 if isinstance(error, RunFailed) else 2",
        "1",
        BAD_INPUT,
    ),
    Mutant(
        "a batch that does not divide",
        "utils/run/launch.py",
        "if batch_size % parts:",
        "if False:",
        BAD_INPUT,
    ),
    Mutant(
        "too few GPUs",
        "utils/run/launch.py",
        "if gpus < processes:",
        "if False:",
        "test_mechanisms.py -k too_few_gpus",
    ),
    Mutant(
        "fp16 on a CPU",
        "utils/run/launch.py",
        'elif precision == "fp16":',
        "elif False:",
        "test_mechanisms.py -k fp16",
    ),
    Mutant(
        "an FSDP configuration on a CPU falls back to DDP",
        "utils/run/launch.py",
        "if fsdp.requested():",
        "if False:",
        "test_configs.py -k 4gpu_fsdp",
    ),
    Mutant(
        "nobody notices that the model is not sharded",
        "utils/run/fsdp.py",
        "if requested() and not accelerator.is_fsdp2:",
        "if False:",
        "test_mechanisms.py -k made_to_shard",
    ),
    Mutant(
        "the model is sharded over both machines",
        "accelerate_configs/2node_8gpu_fsdp.yaml",
        "parallelism_config_dp_replicate_size: 2",
        "parallelism_config_dp_replicate_size: 1",
        "test_configs.py -k hybrid",
    ),
    Mutant(
        "copies and parts that do not fit the processes",
        "utils/run/fsdp.py",
        "if parts == 1 or copies * parts != processes:",
        "if False:",
        "test_mechanisms.py -k kind_of_sharding",
    ),
    Mutant(
        "weights are gathered once per step",
        "scripts/predict_scaling.py",
        "backward_pass = gather + overlapped",
        "backward_pass = overlapped",
        "test_predict_scaling.py -k sharded_step",
    ),
    Mutant(
        "each process has the links of its machine to itself",
        "scripts/predict_scaling.py",
        "between.bandwidth / shards)",
        "between.bandwidth)",
        "test_predict_scaling.py -k on_two_machines",
    ),
    Mutant(
        "every step waits for the device",
        CIFAR,
        "losses.append(loss.detach())",
        "losses.append(loss.detach() if loss.item() else loss.detach())",
        "test_gpu.py -k waits",
    ),
    Mutant(
        "only some of the weights are exported from shards",
        "utils/run/weights.py",
        'state = torch.load(merged)["model"]',
        'state = dict(list(torch.load(merged)["model"].items())[1:])',
        "test_gpu.py -m slow -k sharded",
    ),
    Mutant(
        "the batch divides over the processes of today only",
        "utils/run/launch.py",
        "math.lcm(*possible)",
        "accelerator.num_processes",
        "test_elastic.py -k must_divide",
    ),
    Mutant(
        "a machine without power",
        "utils/run/collectives.py",
        "        keep_alive()",
        "        pass",
        "test_configs.py -k 2cpu",
    ),
    Mutant(
        "two ranks on one GPU",
        "scripts/train_model_parallel.py",
        "if owner != rank:",
        "if False:",
        "test_model_parallel.py -k share",
    ),
    # ------------------------------------------------------------------------------------------------------- launching
    Mutant(
        "a YAML starts fewer processes",
        "accelerate_configs/2cpu.yaml",
        "distributed_type: MULTI_GPU",
        "distributed_type: MULTI_CPU",
        "test_configs.py -k 2cpu",
    ),
    Mutant(
        "a fixed port",
        "accelerate_configs/2cpu.yaml",
        "main_process_port: 0 ",
        "main_process_port: 29511 ",
        "test_configs.py -k any_free_port",
    ),
    Mutant(
        "weights of another run are not loaded",
        "utils/run/weights.py",
        "model.load_state_dict(loaded, strict=False)",
        "pass",
        "test_init_from.py",
    ),
    Mutant(
        "a preset sets no option",
        IMAGES,
        "random_erasing=0.1,",
        "random_erase=0.1,",
        "test_train_images.py -k preset",
    ),
    Mutant(
        "a stopped benchmark leaves its processes running",
        "scripts/benchmark.py",
        "lambda *_: sys.exit(process.PREEMPTED))",
        "signal.SIG_DFL)",
        "test_benchmark.py -m slow -k signal",
    ),
    Mutant(
        "the backward pass is not counted",
        "scripts/baselines.py",
        "F.cross_entropy(model(windows).flatten(0, 1), windows.flatten()).backward()",
        "F.cross_entropy(model(windows).flatten(0, 1), windows.flatten())",
        "test_benchmark.py -k counts",
    ),
    Mutant(
        "what else changed is not said",
        "utils/run/record.py",
        "if before.get(name) != now[name]",
        "if name not in before",
        "test_continue.py -k what_else_changed",
    ),
    Mutant(
        "the folder of another script is compared argument by argument",
        "utils/run/claim.py",
        "if theirs != ours and",
        "if False and",
        "test_continue.py -k another_script",
    ),
    Mutant(
        "the best evaluation is that with the highest metric",
        "scripts/compare_runs.py",
        '(*manifest.rank(line["score"],',
        "(*manifest.rank(line[metric],",
        "test_compare_runs.py -k differing_arguments",
    ),
    Mutant(
        "the job is not requeued",
        "scripts/submit.sbatch",
        'scontrol requeue Incomplete "$SLURM_JOB_ID"',
        "false",
        "test_slurm.py -m slow -k one_process_saves",
    ),
    Mutant(
        "a test split chooses the checkpoint",
        CIFAR,
        'score = metrics["accuracy"] if held_out == "val" else None',
        'score = metrics["accuracy"]',
        "test_validation.py -k newest_checkpoint",
    ),
    Mutant(
        "a score of a test split is accepted",
        "utils/run/folder.py",
        'if split == "test" and score is not None:',
        "if False:",
        "test_validation.py -k refused",
    ),
    Mutant(
        "the smallest script seeds no step",
        MINIMAL,
        "seed_step(accelerator, args.seed, step)",
        "pass",
        "test_copies.py -k dictionaries",
    ),
    Mutant(
        "the warm-up runs under DDP only",
        "utils/run/ddp.py",
        "    for _ in range(2):\n",
        "    for _ in range(2 if isinstance(model, DistributedDataParallel) else 0):\n",
        "test_mechanisms.py -k warm_up",
    ),
    Mutant(
        "buffers keep what the warm-up did",
        "utils/run/ddp.py",
        "value.copy_(buffers[name])",
        "pass",
        "test_mechanisms.py -k warm_up",
    ),
    Mutant(
        "a script without accumulation may lose steps",
        "utils/run/plan.py",
        'raise RuntimeError(f"the loader has no batch for step {step}") from None',
        "return",
        "test_plan.py -k ends_early",
    ),
    Mutant(
        "a text decides what failed",
        "utils/run/failures.py",
        'if type(error).__name__ == "SafetensorError":',
        "if True:",
        "test_mechanisms.py -k full_disk",
    ),
    Mutant(
        "any error with these words is lost contact",
        "utils/run/failures.py",
        "return _is_distributed(error) and bool(",
        "return bool(",
        "test_mechanisms.py -k decided_by_the_type",
    ),
    Mutant(
        "FSDP2 in fp16",
        "utils/run/fsdp.py",
        'if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":',
        "if False:",
        "test_mechanisms.py -k kind_of_sharding",
    ),
    Mutant(
        "below one sample a second there is no speed",
        "utils/run/metrics.py",
        "if samples_per_second < 1:",
        "if False:",
        "test_mechanisms.py -k slow_step",
    ),
    Mutant(
        "Muon loses the value of its closure",
        "utils/muon.py",
        "return super().step(closure)",
        "super().step(closure)",
        "test_gpt.py -k closure",
    ),
    Mutant(
        "averaged weights are not read from a checkpoint",
        "utils/run/weights.py",
        "state = _read_averaged(folder) or state",
        "pass",
        "test_train_images.py -k leaves_everything",
    ),
    Mutant(
        "any run empties the folder of a quick check",
        "utils/run/claim.py",
        'arguments.get(name) and earlier["arguments"].get(name)',
        'earlier["arguments"].get(name)',
        "test_mechanisms.py -k quick_check",
    ),
    Mutant(
        "the oldest checkpoint is sampled from",
        "utils/run/weights.py",
        "checkpoints[-1] /",
        "checkpoints[0] /",
        "test_mechanisms.py -k newest_checkpoint",
    ),
    Mutant(
        "any argument may move",
        "utils/run/record.py",
        "name in PATHS and moved(was, value)",
        "moved(was, value)",
        "test_mechanisms.py -k paths_of_data",
    ),
    Mutant(
        "a long run logs twice",
        "utils/run/plan.py",
        "total_steps // 20",
        "total_steps // 2",
        "test_plan.py -k logs_twenty",
    ),
    Mutant(
        "predictions are not those that the accuracy counts",
        "scripts/evaluate.py",
        "scores.summarize(labels, losses, top), top[:, 0]",
        "scores.summarize(labels, losses, top), logits.argmax(1)",
        "test_train_images.py -k agree",
    ),
    Mutant(
        "a known failure loses its line on the way to the others",
        "utils/run/collectives.py",
        "        if line:\n            return [None, RunFailed(line, retry=failures.may_pass(error))]\n",
        "",
        "test_mechanisms.py -k hear_of_it",
    ),
    Mutant(
        "a number may be written with fullwidth digits",
        "utils/run/domains.py",
        'int: re.compile(r"[+-]?[0-9]+"),',
        'int: re.compile(r"[+-]?\\d+"),',
        "test_domains.py -k nonsense",
    ),
    Mutant(
        "a number that is almost zero is accepted",
        "utils/run/domains.py",
        "and not 0 < abs(value) < self.least)",
        ")",
        "test_domains.py -k number",
    ),
    Mutant(
        "a flag takes any number",
        "utils/run/arguments.py",
        "type=SEED,",
        "type=int,",
        "test_domains.py -k domain",
    ),
    Mutant(
        "a home folder only in words of a shell",
        "utils/run/domains.py",
        'if not value.startswith("~"):',
        "if True:",
        "test_domains.py -k home",
    ),
    Mutant(
        "an error of argparse has several lines",
        "utils/run/failures.py",
        "super().__init__(one_line(line))",
        "super().__init__(line)",
        "test_domains.py -k argparse",
    ),
    Mutant(
        "images of any size for every model",
        "utils/pretrained.py",
        '            model(torch.empty(2, 3, size, size, device="meta"))',
        "            pass",
        "test_domains.py -k cannot_take",
    ),
    Mutant(
        "averaged weights from the start of a short run",
        IMAGES,
        "return min(decay, (1 + updates) / (10 + updates))",
        "return decay",
        "test_train_images.py -k decay_of_averaged",
    ),
    Mutant(
        "a restart begins to average anew",
        IMAGES,
        "rising = ema_decay_at(int(ema.n_averaged), decay)",
        "rising = ema_decay_at(1, decay)",
        "test_train_images.py -k decay_of_averaged",
    ),
    Mutant(
        "only averaged weights are scored",
        IMAGES,
        "    if ema:  # does the average help?",
        "    if False:",
        "test_train_images.py -k leaves_everything",
    ),
    Mutant(
        "of equal scores the first checkpoint is the best",
        "utils/run/manifest.py",
        "for path in reversed(paths):",
        "for path in paths:",
        "test_mechanisms.py -k equal_scores",
    ),
    Mutant(
        "a checkpoint with an equal score is not saved",
        "utils/run/folder.py",
        "self._improved = manifest.rank(score, loss) >= manifest.rank(*self._best)",
        "self._improved = manifest.rank(score, loss) > manifest.rank(*self._best)",
        "test_mechanisms.py -k agree_which",
    ),
    Mutant(
        "a prefix inside a name is removed",
        "utils/run/weights.py",
        "while prefix := shared_prefix(state, WRAPPERS):",
        "for prefix in ('module.', 'model.'):",
        "test_init_from.py -k share",
    ),
    Mutant(
        "a file of torch.save executes code",
        "utils/run/weights.py",
        'state = torch.load(regular_file(file), map_location="cpu", weights_only=True)',
        'state = torch.load(regular_file(file), map_location="cpu", weights_only=False)',
        "test_init_from.py -k anything_else",
    ),
    Mutant(
        "an interrupted tool measures everything again",
        "utils/run/measurements.py",
        'self.values = kept["values"]',
        "self.values = {}",
        "test_measurements.py",
    ),
    Mutant(
        "figures of other versions are kept",
        "utils/run/measurements.py",
        "if changed:",
        "if False:",
        "test_measurements.py -k mixed",
    ),
    Mutant(
        "half a round of a benchmark is kept",
        "scripts/benchmark.py",
        "        self._answers.append(function())\n",
        "        self._answers.append(function())\n"
        "        self._kept.keep(f'{self._benchmark} {self._count}', {'seconds': 1, 'answers': self._answers})\n",
        "test_measurements.py -k not_finished",
    ),
    Mutant(
        "figures are written at the end only",
        "scripts/benchmark.py",
        "        write(folder, figures)\n    finished.finish()",
        "    write(folder, figures)\n    finished.finish()",
        "test_measurements.py -k not_finished",
    ),
    Mutant(
        "what chaos.py launches outlives it",
        "scripts/chaos.py",
        "        if launcher.poll() is None:\n",
        "        if False:\n",
        "test_measurements.py -k ends_what",
    ),
    Mutant(
        "chaos.py keeps a round with a difference",
        "scripts/chaos.py",
        '        (run.parent / "unfinished.json").unlink(missing_ok=True)\n        raise SystemExit(1)\n',
        "        return seconds\n",
        "test_measurements.py -k difference",
    ),
    Mutant(
        "compare_ddp.py compares runs of other versions",
        "scripts/compare_ddp.py",
        "        if name in kept.values:\n",
        "        if (run.path / f'{name}.safetensors').exists():\n",
        "test_compare_ddp.py -k other_versions",
    ),
    Mutant(
        "batch norm of one sample",
        "utils/run/ddp.py",
        "if micro_batch_size == 1:",
        "if micro_batch_size == 0:",
        "test_mechanisms.py -k one_sample",
    ),
    # ------------------------------------------------------------------------------------------ loops, launches
    Mutant(
        "failed checkpoints are counted over the whole run",
        "utils/run/folder.py",
        "self._failed_saves = 0 if written else self._failed_saves + 1",
        "self._failed_saves += not written",
        "test_loops.py -k in_a_row",
    ),
    Mutant(
        "a file that the manifest does not name is loaded",
        "utils/run/manifest.py",
        "if unknown := sizes.keys() - files.keys() - {MANIFEST}:",
        "if unknown := set():",
        "test_loops.py -k does_not_name",
    ),
    Mutant(
        "a short run logs as seldom as a long one",
        "utils/run/plan.py",
        "args.log_every or max(1, min(10, total_steps // 20))",
        "args.log_every or 10",
        "test_plan.py",
    ),
    Mutant(
        "weights are averaged after each micro-batch",
        IMAGES,
        "                    losses.append(loss.detach())\n",
        "                    losses.append(loss.detach())\n"
        "                    ema and len(losses) == 1 and ema.update_parameters(plain)\n",
        "test_loops.py -k averaged_once",
    ),
    Mutant(
        "an evaluation that a signal prevented is never done",
        MINIMAL,
        "    if run.evaluation_due:  # a signal came first\n",
        "    if False:\n",
        "test_loops.py -k last_step",
    ),
    Mutant(
        "sampling draws from the generator of dropout",
        GPT,
        "torch.multinomial(probabilities, 1, generator=generator)",
        "torch.multinomial(probabilities, 1)",
        "test_loops.py -k sampling",
    ),
    Mutant(
        "dropout is off after the first sample",
        GPT,
        "    model.train(was_training)\n",
        "",
        "test_loops.py -k sampling",
    ),
    Mutant(
        "training goes on in evaluation mode, with images",
        IMAGES,
        "    if not ema:\n        pretrained.train(model)\n",
        "",
        "test_loops.py -k leaves_the_model",
    ),
    Mutant(
        "each process takes all cores",
        "utils/run/cpu.py",
        'return max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))',
        "return cores()",
        "test_loops.py -k share_the_cores",
    ),
    Mutant(
        "a dry run is uploaded",
        "utils/run/arguments.py",
        "            args.push_to_hub = None\n",
        "            pass\n",
        "test_loops.py -k dry_run",
    ),
    Mutant(
        "the statistics of averaged weights differ between processes",
        IMAGES,
        "            broadcast(buffer)",
        "            pass",
        "test_loops.py -k trained_ones",
    ),
    Mutant(
        "a byte that fills up the last window counts",
        GPT,
        'counts = (batch["targets"] >= 0).sum(1)',
        'counts = (batch["targets"] >= -100).sum(1)',
        "test_loops.py -k held_out_byte",
    ),
    Mutant(
        "a wait inside C++ outlives a signal",
        "utils/run/process.py",
        "    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)\n",
        "",
        "test_signals.py -k stopped_process",
    ),
    Mutant(
        "nohup protects no longer",
        "utils/run/process.py",
        "if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:",
        "if True:",
        "test_signals.py -k hangup",
    ),
    Mutant(
        "a closed terminal kills",
        "utils/run/process.py",
        "signal.SIGINT, signal.SIGHUP)",
        "signal.SIGINT)",
        "test_signals.py -k closed_terminal",
    ),
    Mutant(
        "an exported variable makes a launcher of a shell",
        "utils/run/process.py",
        "if launcher.find():  #",
        'if "ACCELERATE_MIXED_PRECISION" in os.environ:  #',
        "test_signals.py -k outlives_whoever",
    ),
    Mutant(
        "a batch that cannot be sent is waited for",
        "utils/data/loaders.py",
        "    Queue._on_queue_feeder_error = staticmethod(_end_worker)\n",
        "",
        "test_signals.py -k cannot_be_sent",
    ),
    Mutant(
        "a stuck worker outlives the run",
        "utils/data/loaders.py",
        "        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "        pass\n",
        "test_signals.py -k outlive_a_signal",
    ),
    Mutant(
        "a signal after the last save waits for all results",
        "utils/run/process.py",
        '        elif _phase == "finishing":',
        "        elif False:",
        "test_signals.py -k after_the_last_save",
    ),
    Mutant(
        "a loader waits for ever",
        "utils/data/loaders.py",
        "timeout=timeout if num_workers else 0",
        "timeout=0",
        "test_batches.py -k options_of_loaders",
    ),
    Mutant(
        "an evaluation ignores signals",
        "utils/run/guard.py",
        "                raise process.Interrupted\n",
        "                pass\n",
        "test_signals.py -k interrupted_and_done",
    ),
    Mutant(
        "one process alone interrupts its evaluation",
        "utils/run/guard.py",
        "dist.all_reduce(wish, dist.ReduceOp.MAX",
        "dist.all_reduce(wish, dist.ReduceOp.MIN",
        "test_signals.py -k interrupted_and_done",
    ),
    Mutant(
        "a restart forgets the evaluation",
        "scripts/train_minimal.py",
        "    if run.evaluation_due:  # a signal came first\n        validate(step)\n",
        "",
        "test_signals.py -k interrupted_and_done",
    ),
    Mutant(
        "a late score does not reach its checkpoint",
        "utils/run/folder.py",
        "                manifest.amend(self._checkpoint, changed)\n",
        "                pass\n",
        "test_signals.py -k interrupted_and_done",
    ),
    Mutant(
        "an evaluation that was done is due again",
        "utils/run/folder.py",
        "due and self._evaluated_at != step",
        "due",
        "test_signals.py -k after_the_last_save",
    ),
    Mutant(
        "random states may be lost",
        "utils/run/checkpoint.py",
        '        torch.equal(torch.get_rng_state(), states["torch_manual_seed"])\n        and ',
        "        ",
        "test_hostile.py -k random_states",
    ),
    Mutant(
        "a link in a checkpoint is followed",
        "utils/run/manifest.py",
        "found, relative = path.lstat(), ",
        "found, relative = path.stat(), ",
        "test_hostile.py -k only_the_files",
    ),
    Mutant(
        "a file of macOS makes a checkpoint unreadable",
        "utils/run/manifest.py",
        'JUNK = (".DS_Store", ',
        "JUNK = (",
        "test_hostile.py -k system_adds",
    ),
    Mutant(
        "a device is read like a file",
        "utils/run/files.py",
        "        if not resolved.is_file():",
        "        if False:",
        "test_hostile.py -k regular_files",
    ),
    Mutant(
        "an old checkpoint that cannot be deleted ends the run",
        "utils/run/checkpoint.py",
        '    except OSError as error:\n        reason = error.strerror or error\n        line = f"warning: the old',
        '    except KeyError as error:\n        reason = error.strerror or error\n        line = f"warning: the old',
        "test_hostile.py -k cannot_be_deleted",
    ),
    Mutant(
        "weights are readable by their owner only",
        "utils/run/weights.py",
        "    set_usual_mode(temporary)\n",
        "",
        "test_signals.py -k usual_permissions",
    ),
    Mutant(
        "an error before training leaves a folder",
        "utils/run/folder.py",
        "        failures.on_failure(lambda reason, retry: self._claim.undo() or True)\n",
        "",
        "test_signals.py -k leaves_no_folder",
    ),
    Mutant(
        "a renamed folder is not noticed",
        "utils/run/folder.py",
        "            there = False\n",
        "            there = True\n",
        "test_folder.py -k replaced",
    ),
    Mutant(
        "a class name starts a formula",
        "utils/run/output.py",
        '.replace("$", r"\\$")',
        "",
        "test_hostile.py -k escapes",
    ),
    Mutant(
        "a class name controls the terminal",
        "utils/run/output.py",
        "    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], str(text))",
        "    return str(text)",
        "test_hostile.py -k one_line",
    ),
    Mutant(
        "a class name formats the card",
        "utils/run/output.py",
        "    escaped = html.escape(one_line(text), quote=False)",
        "    escaped = one_line(text)",
        "test_hostile.py -k escapes",
    ),
    Mutant(
        "a plot that fails ends the run",
        "utils/run/failures.py",
        "    except Exception as error:\n        reason = one_line(str(error).strip()",
        "    except KeyError as error:\n        reason = one_line(str(error).strip()",
        "test_hostile.py -k extra",
    ),
    Mutant(
        "output that cannot be printed ends the run",
        "utils/run/output.py",
        "        except OSError:  # no reader",
        "        except KeyError:  # no reader",
        "test_signals.py -k cannot_be_printed",
    ),
    Mutant(
        "a closed descriptor is used for a file",
        "utils/run/output.py",
        "            os.open(os.devnull, os.O_RDWR)",
        "            pass",
        "test_signals.py -k cannot_be_printed",
    ),
    Mutant(
        "variables of another launch are believed",
        "utils/run/launcher.py",
        "    mine = MPI if is_elastic() else RANKS + MPI",
        "    mine = ()",
        "test_signals.py -k variables",
    ),
    Mutant(
        "an srun step's variables are refused under a launcher",
        "utils/run/launcher.py",
        "    if is_elastic() or not several:",
        "    if not several:",
        "test_signals.py -k mean_nothing",
    ),
    Mutant(
        "nobody may choose the threads",
        "utils/run/cpu.py",
        "    return _wanted_threads() or cores_per_process()",
        "    return cores_per_process()",
        "test_signals.py -k threads_that",
    ),
    Mutant(
        "the quota of a container is ignored",
        "utils/run/cpu.py",
        "int(min(count, quota()))",
        "int(count)",
        "test_hostile.py -k quota",
    ),
    Mutant(
        "an error that comes again says to run the same command",
        "utils/run/failures.py",
        "    return bool(killed or ",
        "    return bool(True or ",
        "test_continue.py -k come_again",
    ),
    Mutant(
        "a long save is cut off",
        "utils/run/process.py",
        '    before, _phase = _phase, "saving"\n',
        "    before = _phase\n",
        "test_signals.py -k however_long",
    ),
]


def outcome(mutant, address):
    """Applies the edit to a copy and runs its tests; returns the test that noticed, None, `SKIPPED`
    or `LEFT_OUT`.
    """
    if time.time() > BEGIN_UNTIL:
        return LEFT_OUT
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        shutil.copytree(
            ROOT,
            copy,
            ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache"),
        )
        (Path(folder) / "shared").symlink_to(
            ROOT.parent / "shared"
        )  # data that some tests use if it is there
        path = copy / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(
                f"{mutant.name}: what is to be changed stands {text.count(mutant.old)} times in "
                f"{mutant.file}"
            )
        path.write_text(text.replace(mutant.old, mutant.new))
        file, *options = re.findall(r"\S+", mutant.tests)
        words = [
            "-m",
            "pytest",
            "-x",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            f"{folder}/tmp",
            f"tests/{file}",
        ]
        done = warm.run(
            [*words, *options], {**os.environ, warm.ADDRESS: address}, SECONDS, cwd=str(copy)
        )
    noticed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return None if " passed" in done.stdout else SKIPPED
    if done.returncode != 1 or not noticed:
        raise SystemExit(
            f"{mutant.name}: the tests did not run\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return noticed[1].removeprefix("tests/")


def main():
    words = sys.argv[1:]
    # What a shell starts in the background ignores these; the tests send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    chosen = [
        m for m in MUTANTS if not words or any(word in f"{m.name} {m.file}" for word in words)
    ]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "passive",
    }
    alive, left_out, began = [], 0, time.monotonic()
    with (
        tempfile.TemporaryDirectory() as home,
        warm.server({**environment, "HF_HOME": home}) as address,
    ):
        os.environ.update(environment, HF_HOME=home, **{warm.ADDRESS: address})
        with ThreadPoolExecutor(2) as pool:
            print("| wrong edit | file | test that noticed |\n|---|---|---|", flush=True)
            for mutant, noticed in zip(
                chosen, pool.map(lambda m: outcome(m, address), chosen), strict=True
            ):
                print(f"| {mutant.name} | `{mutant.file}` | {noticed or '**none**'} |", flush=True)
                alive += [] if noticed else [mutant.name]
                left_out += noticed == LEFT_OUT
    print(
        f"\n{len(alive)} of {len(chosen)} wrong edits were missed, {left_out} left out, in "
        f"{time.monotonic() - began:.0f} s"
    )
    if alive:
        raise SystemExit(f"not noticed: {'; '.join(alive)}")


if __name__ == "__main__":
    main()
