"""Trains our backbones in transformers: `python examples/huggingface.py --model upernet`, `detr` or `classifier`.

UperNet and DETR use a hierarchy through `TimmBackbone`; Trainer and pipeline use a classifier through
`TimmWrapper`. Each is trained, evaluated on held-out digits, saved, and loaded again with bit-equal outputs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import publish
import segment
import timm
import torch
from common import BACKGROUND_AND_DIGITS, MEAN, STD, fit, held_out, options, parse, save_picture
from PIL import Image
from scenes import CLASSES, Scene
from sklearn.datasets import load_digits
from timm.models import register_model
from torch import Tensor, nn
from torchmetrics.detection import MeanAveragePrecision
from torchvision.ops import box_convert
from torchvision.utils import draw_bounding_boxes
from transformers import (
    AutoModelForImageClassification,
    DetrConfig,
    DetrForObjectDetection,
    PreTrainedModel,
    TimmBackboneConfig,
    Trainer,
    TrainingArguments,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    pipeline,
)

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.data.digits import every_fifth


@register_model
def vilonghorn_scenes(pretrained: bool = False, **kwargs) -> nn.Module:
    """A backbone for small images, registered because the configuration of `TimmBackbone` has no keyword arguments."""
    return timm.create_model("vilonghornv2_nano", pretrained, stem_stride=2, **kwargs)


def normed(scenes: list[Scene]) -> Tensor:
    return (torch.stack([scene.image for scene in scenes]) - MEAN) / STD


def check_round_trip(model: PreTrainedModel, pixel_values: Tensor) -> None:
    """Saves a model, loads it again, and raises AssertionError if weights or outputs differ."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).eval()
        saved, found = model.state_dict(), loaded.state_dict()
        if saved.keys() != found.keys() or not all(torch.equal(value, found[name]) for name, value in saved.items()):
            raise AssertionError("the weights of the loaded model differ from those that were saved")
        # The loaded tensors are in the unaligned memory of a mapped file: torch's convolutions round differently there.
        for tensor in (*loaded.parameters(), *loaded.buffers()):
            tensor.data = tensor.data.clone()
        if not torch.equal(loaded(pixel_values).logits, model(pixel_values).logits):
            raise AssertionError("the outputs of the loaded model differ from those of the saved one")
    print("saved and loaded again: the same outputs to the last bit")


def upernet(args) -> float:
    """Trains UperNet; returns the mean IoU on held-out scenes."""
    backbone = TimmBackboneConfig(backbone="vilonghorn_scenes", out_indices=[0, 1, 2])
    config = UperNetConfig(
        backbone_config=backbone, hidden_size=64, use_auxiliary_head=False, num_labels=BACKGROUND_AND_DIGITS
    )
    model = UperNetForSemanticSegmentation(config)

    def loss(batch: list[Scene]) -> Tensor:
        return segment.cross_entropy(model(normed(batch)).logits, torch.stack([s.semantic() for s in batch]))

    fit(model, loss, args)
    scenes = list(held_out(args))
    with torch.no_grad():
        predicted = model(normed(scenes)).logits.argmax(1)
    score = segment.mean_iou(predicted, torch.stack([s.semantic() for s in scenes]))
    print(f"held out: mean IoU {score:.3f} on {len(scenes)} scenes")
    save_picture(args.picture, map(segment.draw, [s.image for s in scenes[:8]], predicted), columns=4)
    check_round_trip(model, normed(scenes[:2]))
    return score


def detr(args) -> float:
    """Trains DETR; returns the mAP on held-out scenes."""
    sizes = dict(d_model=96, encoder_layers=2, decoder_layers=3, encoder_ffn_dim=192, decoder_ffn_dim=192)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4)
    config = DetrConfig(
        backbone_config=TimmBackboneConfig(backbone="vilonghorn_scenes", out_indices=[2]),
        num_queries=12,
        num_labels=len(CLASSES),
        auxiliary_loss=True,
        dropout=0.0,
        **sizes,
        **heads,
    )
    model = DetrForObjectDetection(config)

    def loss(batch: list[Scene]) -> Tensor:
        boxes = [box_convert(s.boxes, "xyxy", "cxcywh") / args.side for s in batch]
        labels = [dict(class_labels=s.labels, boxes=b) for s, b in zip(batch, boxes)]
        return model(normed(batch), labels=labels).loss

    fit(model, loss, args)
    scenes = list(held_out(args))
    with torch.no_grad():
        out = model(normed(scenes))
    scores, labels = out.logits.softmax(2)[..., :-1].max(2)
    boxes = box_convert(out.pred_boxes, "cxcywh", "xyxy") * args.side
    metric = MeanAveragePrecision()
    found = [dict(zip(("scores", "labels", "boxes"), one)) for one in zip(scores, labels, boxes)]
    metric.update(found, [dict(labels=scene.labels, boxes=scene.boxes) for scene in scenes])
    score = metric.compute()["map"].item()
    print(f"held out: mAP {score:.3f} on {len(scenes)} scenes")
    tops = [one["scores"].topk(len(scene.labels)).indices for scene, one in zip(scenes[:16], found)]
    pictures = [draw_bounding_boxes(s.image, one["boxes"][top]) for s, one, top in zip(scenes, found, tops)]
    save_picture(args.picture, ((255 * picture).byte() for picture in pictures))
    check_round_trip(model, normed(scenes[:2]))
    return score


class Digits(torch.utils.data.Dataset):
    """The embedded digits as PIL images, and with a transform as Trainer takes them."""

    def __init__(self, train: bool, transform=None) -> None:
        digits = load_digits()
        chosen = every_fifth(digits.target, 4) != train
        grey = np.rint(digits.images[chosen] * (255 / 16)).astype(np.uint8)
        self.images = [Image.fromarray(image).convert("RGB") for image in grey]
        self.labels, self.transform = digits.target[chosen].tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        return dict(pixel_values=self.transform(self.images[index]), labels=self.labels[index])


def classifier(args) -> float:
    """Trains a classifier with Trainer; returns the top-1 of a pipeline on the held-out digits."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = timm.create_model("vilonghorn_nano", img_size=32, patch_size=4, num_classes=len(CLASSES))
        seen = dict(input_size=(3, 32, 32), crop_pct=1.0, mean=(0.5,) * 3, std=(0.5,) * 3)
        path, labels = Path(folder, "fresh"), dict(label_names=list(CLASSES))
        publish.save_pretrained(fresh, path, publish.make_card(fresh, "digits"), model_config=labels, data_config=seen)
        model = AutoModelForImageClassification.from_pretrained(path)
        transform = timm.data.create_transform(**timm.data.resolve_data_config(seen, verbose=False))
        training = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            lr_scheduler_type="cosine",
            warmup_steps=args.steps // 20,
            seed=args.seed,
            report_to=[],
            save_strategy="no",
            logging_steps=50,
            disable_tqdm=True,
        )
        trainer = Trainer(model, training, train_dataset=Digits(True, transform))
        trainer.train()
        trainer.save_model(Path(folder, "trained"))
        ask = pipeline("image-classification", str(Path(folder, "trained")), device="cpu", use_fast=True)
        digits = Digits(False)
        said = [answers[0]["label"] for answers in ask(digits.images, batch_size=64, top_k=1)]
        top1 = sum(label == CLASSES[truth] for label, truth in zip(said, digits.labels)) / len(said)
        print(f"held out: top-1 {top1:.1%} on {len(said)} digits, by the pipeline")
        check_round_trip(model.eval(), torch.stack([transform(image) for image in digits.images[:4]]))
    return top1


TASKS = {
    "upernet": (upernet, dict(steps=700, digits=6)),
    "detr": (detr, dict(steps=300, lr=1e-3)),
    "classifier": (classifier, dict(steps=250, batch=64)),
}


def main(argv: list[str] | None = None) -> float:
    """Runs a task; returns its score."""
    args = parse(options(__doc__, {name: defaults for name, (_, defaults) in TASKS.items()}, argv), argv)
    return TASKS[args.model][0](args)


if __name__ == "__main__":
    main()
