"""Bigger recurrent models and transformers on the GPU you have: names are looked up in `front_door` when first used."""
__version__ = "0.1.0"

from .front_door import MODULE_OF, attribute as __getattr__, listed as __dir__

__all__ = [*MODULE_OF]
