"""Readers: spellings of torch code in, generic operators out (:mod:`fp8pass.spellings.reader`)."""
