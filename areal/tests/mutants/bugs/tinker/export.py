"""Bugs of exported adapters that the suite must catch: names, encryption, and recipients."""

from __future__ import annotations

import shutil
from typing import Any

from areal.engine.lora.peft_format import SERVICE_HEAD
from areal.tests.mutants.planting import Function, mutant

NAMES = "unit/tinker/backends/test_export_names.py::"
ENCRYPTION = "unit/tinker/service/test_encryption.py::"


@mutant("areal.engine.lora.peft_format:service_head", NAMES + "test_tied_head_keeps_its_name")
def tied_head_is_merged_into_the_embedding(right: Function) -> Function:
    """The head of a tied model is exported under the service's name: the cookbook merges it into the input embedding, without an error."""
    return lambda model: SERVICE_HEAD


@mutant("areal.engine.lora.peft_format:rename_head", NAMES + "test_head_has_the_name_of_the_service")
def configuration_names_another_head(right: Function) -> Function:
    """The weights of an export are renamed, and the modules in its configuration are not."""
    return lambda config, weights, old, new: (dict(config), right(config, weights, old, new)[1])


@mutant(
    "areal.tinker.service.store.encryption:encrypt_folder",
    ENCRYPTION + "test_every_file_is_encrypted_to_every_recipient",
)
def export_readable_by_its_first_recipient_only(right: Function) -> Function:
    """Files are encrypted to the first recipient."""
    return lambda source, folder, recipients: right(source, folder, recipients[:1])


@mutant(
    "areal.tinker.service.store.encryption:encrypt_folder",
    ENCRYPTION + "test_every_file_is_encrypted_to_every_recipient",
)
def export_with_a_suffix_only(right: Function) -> Function:
    """Files get the suffix .age and are not encrypted."""

    def wrong(source: Any, folder: Any, recipients: Any) -> None:
        shutil.copytree(source, folder)
        for file in list(folder.iterdir()):
            file.rename(f"{file}.age")

    return wrong
