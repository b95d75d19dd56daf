"""Spellings of norms, activations and quantises, with the form that each must be read as.

Each is written the way some model or library writes it; the expected form is derived by hand. They
stand in a module for each topic, and all of them can be had from here.
"""

from __future__ import annotations

from spell_activations import *  # noqa: F403
from spell_common import *  # noqa: F403
from spell_layer_norms import *  # noqa: F403
from spell_more_quantises import *  # noqa: F403
from spell_norms import *  # noqa: F403
from spell_quantises import *  # noqa: F403
