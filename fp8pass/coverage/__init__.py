"""What fp8pass reads of real model families: ``fp8pass coverage`` and the table in the docs."""
