"""Measured choice: timing the kernels that can take a product on the device that is here.

``measure`` (one problem), ``store`` (what was measured, as readable JSON, one file per device),
``timing`` (how), ``check`` (numbers before speed), ``session`` (what a compile uses), ``tables``
(files that can be shipped). Importing this imports torch and asks no device.
"""
