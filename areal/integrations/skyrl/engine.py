"""SkyRL's engine process with the backend: ``python -m areal.integrations.skyrl.engine``, with the options of SkyRL's."""

from __future__ import annotations

from skyrl.tinker.engine import main

from areal.integrations.skyrl.registration import register

if __name__ == "__main__":
    register()
    main()
