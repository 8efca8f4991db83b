"""A program: `watched_reading.py` of the core's tests, with pretrained models."""

from pathlib import Path

import watched_reading

import selfattn_models
from selfattn_models import _chat, _chat_renderer

watched_reading.KNOWN += (str(Path(selfattn_models.__path__[0]).resolve()),)

watched_reading.PROGRAMS.add(_chat.PROGRAM)


def read(path):
    """Templates are rendered in this process too, where code that runs is seen."""
    model = selfattn_models.load(path)
    if hasattr(model, "chat_prompt"):
        variables = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
        here = _chat_renderer.answer(model.chat_template, variables)
        assert "why" in here or here["text"] == model.chat_prompt("hi")
        return model.chat_prompt("hi")
    return len(model.encode("the sea")) if model.tokenizer else type(model).__name__


if __name__ == "__main__":
    watched_reading.main(read)
