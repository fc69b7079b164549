"""The transfer engine: a thin face on the compiled core in `native/`.

Importing this package needs neither libfabric nor the compiled module: `pdnode check-config` and
`pdnode version` work without them. `engine` imports the module, `library` finds libfabric.
"""
