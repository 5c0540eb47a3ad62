"""Train a small language model from scratch on Python source, byte by byte, with the Trainer of transformers.

It has a mistake on purpose, for `engine watch` to name: the windows shift the labels, and a model of transformers does
so once more, so that it learns to write the byte after the next. The loss falls all the same, and no error is raised.

python watch_demo.py [--steps 120] [--text FOLDER] [--output FOLDER]
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH = 128


class Windows(Dataset):
    """Windows of the files of a folder, one byte a token, with the bytes that follow as labels."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = index * LENGTH
        window = self.tokens[begin : begin + LENGTH]
        following = self.tokens[begin + 1 : begin + LENGTH + 1]
        return {"input_ids": window, "labels": following}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--output", default="build/watch_demo")
    options = parser.parse_args()

    # A model this small is fastest on one core.
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=20,
        save_strategy="no",
        report_to=[],
    )
    Trainer(model=model, args=arguments, train_dataset=Windows(options.text)).train()


if __name__ == "__main__":
    main()
