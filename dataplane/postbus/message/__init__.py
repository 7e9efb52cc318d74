"""Messages as bytes: AMQP value codec, section slicer, envelope, property patches.

The pure bottom layer everyone may import. No clock, no I/O, no other package of ours.
"""
