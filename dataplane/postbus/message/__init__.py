"""Messages as bytes: AMQP value codec, section slicer, envelope, property patches.

The bottom layer, which every package may import. Pure: no clock, no I/O, no other package.
"""
