"""The extra `llm`, imported where it is used, and what is loaded from the Hugging Face hub or a folder."""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

from coterie.errors import ConfigError, explain

_LANGUAGE_MODEL = "the name of a causal language model on the Hugging Face hub, such as gpt2, or the folder of one"
_PATIENCE = 5.0  # seconds to find out whether the hub can be reached


def extra(package: str) -> Any:
    """A package of the extra `llm`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they warn each other of what they will remove
            return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"language models need {package}, which cannot be imported ({error}). Run: pip install 'coterie[llm]'"
        ) from None


def loaded(key: str, name: str, load: Callable[..., Any]) -> Any:
    """What `load(name, local_files_only=...)` makes of a model's name or folder, or one sentence on why it cannot. What
    is in the local cache is taken from there."""
    with quietly():
        try:
            return load(name, local_files_only=True)
        except Exception as error:  # many kinds, from no such name to a damaged file
            do = _without_the_hub(name, error)
        if do is None:
            try:
                return load(name, local_files_only=False)
            except Exception as error:
                do = f"The hub does not give it: {_in_short(error)}. Check the name, or give a folder."
    raise ConfigError(explain(key, name, _LANGUAGE_MODEL, do))


def _without_the_hub(name: str, error: Exception) -> str | None:
    """What to do if asking the hub is of no use; it would be asked for a minute, with a page of complaints."""
    constants = extra("huggingface_hub.constants")
    if Path(name).is_dir():
        return f"This folder cannot be read: {_in_short(error)}. Save both model and tokenizer by save_pretrained."
    if constants.HF_HUB_OFFLINE:
        return "It is not in the local cache and HF_HUB_OFFLINE forbids to ask the hub. Unset that, or give a folder."
    try:
        requests.head(constants.ENDPOINT, timeout=_PATIENCE)
    except requests.RequestException:
        return f"It is not in the local cache and {constants.ENDPOINT} does not answer. Connect, or give a folder."
    return None


def _in_short(error: Exception) -> str:
    """The first line; the hub's words are a page."""
    return str(error).strip().partition("\n")[0].rstrip(".:")[:200] or type(error).__name__


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without what these libraries say to their own developers, and without their progress bars."""
    logging = extra("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
