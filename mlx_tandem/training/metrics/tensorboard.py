"""TensorBoard: event files in a folder, written without TensorFlow or PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mlx_tandem.training.metrics.writer import Sample


class TensorBoard:
    """Writes one event file. Scalars are named kind/name, and samples are texts under "samples"."""

    def __init__(self, folder: Path):
        """Begin an event file in `folder`."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events = EventFileWriter(str(folder))

    def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Write each number as a scalar."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(
            step, Summary(value=[Summary.Value(tag=f"{kind}/{name}", simple_value=x) for name, x in values.items()])
        )

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write all samples as one text with a row for each."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        texts = [text.encode() for sample in samples for text in [_text(sample)]]
        tensor = TensorProto(dtype="DT_STRING", string_val=texts)
        tensor.tensor_shape.dim.add(size=len(texts))
        metadata = create_summary_metadata(display_name="samples", description="")
        self._add(step, Summary(value=[Summary.Value(tag="samples", metadata=metadata, tensor=tensor)]))

    def close(self) -> None:
        """Write what is left."""
        self._events.close()

    def _add(self, step: int, summary: object) -> None:
        import time

        from tensorboard.compat.proto.event_pb2 import Event

        self._events.add_event(Event(step=step, wall_time=time.time(), summary=summary))
        self._events.flush()


def _text(sample: Sample) -> str:
    """Return a sample as Markdown, whose indented lines are shown as they are."""
    parts = [("prompt", sample.prompt), ("answer", sample.completion)]
    if sample.expected is not None:
        parts.append(("expected", sample.expected))
    if sample.reward is not None:
        parts.append(("reward", f"{sample.reward:g}"))
    return "\n\n".join(f"**{name}**\n\n    " + text.replace("\n", "\n    ") for name, text in parts)
