# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, embedsignature=True
"""Runs of usual messages in C: frames, sections, queue entries and rows.

Nothing is decided here. Each function does the first elements of its input that have the usual form
and returns how far it came; its twin in Python, named in its docstring, is its definition and does
the rest. Objects of other classes than the expected ones and numbers beyond 64 bits end a run.
Nothing is allocated by a number from the wire: sizes are compared with the octets that are there.

Objects of slotted classes are filled through the offsets of their slots, so that each class has one
definition.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from cpython.tuple cimport PyTuple_Check, PyTuple_GET_SIZE, PyTuple_SET_ITEM
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030E0000  /* a tuple knows its hash, or -1 */
    #define POSTBUS_UNHASHED(row) (((PyTupleObject *)(row))->ob_hash = -1)
    #else
    #define POSTBUS_UNHASHED(row) ((void)(row))
    #endif
    """
    void POSTBUS_UNHASHED(PyObject *row) noexcept
    const char *POSTBUS_SOURCE  # which the compiler gets from compile_runs.py

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        object (*tp_alloc)(type, Py_ssize_t)
    void PyObject_GC_UnTrack(object) noexcept
    long long PyLong_AsLongLongAndOverflow(object, int*) except? -1

cdef extern from "structmember.h":
    ctypedef struct PyMemberDef:
        Py_ssize_t offset
        int type
    ctypedef struct PyMemberDescrObject:
        PyMemberDef *d_member
    PyTypeObject PyMemberDescr_Type
    int T_OBJECT_EX

cdef enum:
    TAG_BYTES = 16
    ROW_BYTES = 40  # of a row for COPY without its properties and body

cdef enum:  # fields of an envelope, in the order of ENVELOPE
    ANNOTATION_COUNT, ANNOTATIONS, APPLICATION_PROPERTIES, BODY, DEAD_LETTER_SOURCE
    DELIVERY_ANNOTATIONS, HOP_COUNT, IS_DURABLE, MESSAGE_ID, ORIGIN_SEQUENCE, PARTITION_KEY
    PRIORITY, PROPERTIES, SCHEDULED_MS, SESSION_ID, SHARED, SIZE_BYTES, TTL_MS, VIA_PARTITION_KEY

cdef enum:  # fields of a queued message, in the order of QUEUED
    ENQUEUED_MS, LOADED, FAILURES, IS_DEFERRED, LOCKED_UNTIL_MS, RECEIVER, RECORDED, ROW_KEY
    SEQUENCE, UNLOADED_BYTES, TOKEN, UNLOADED_TTL_MS

cdef enum:
    TTL_BIT = 1 << TTL_MS
    PRIORITY_BIT = 1 << PRIORITY
    ORIGIN_BITS = 1 << ORIGIN_SEQUENCE | 1 << DEAD_LETTER_SOURCE
    SCHEDULE_AND_KEYS = (
        1 << SCHEDULED_MS | 1 << SESSION_ID | 1 << PARTITION_KEY | 1 << VIA_PARTITION_KEY
    )

ENVELOPE = (
    "annotation_count", "annotations", "application_properties", "body", "dead_letter_source",
    "delivery_annotations", "hop_count", "is_durable", "message_id", "origin_sequence",
    "partition_key", "priority", "properties", "scheduled_ms", "session_id", "shared",
    "size_bytes", "ttl_ms", "via_partition_key",
)
QUEUED = (
    "enqueued_ms", "envelope", "failures", "is_deferred", "locked_until_ms", "receiver",
    "recorded", "row_key", "sequence", "size_bytes", "token", "ttl_ms",
)


SOURCE = POSTBUS_SOURCE.decode()
"""Digest of the source of this module, by which `postbus.fast` knows an outdated one."""


# --- octets, numbers and slots --------------------------------------------------------------------

cdef inline uint32_t _u32(const uint8_t *at) noexcept:
    return (<uint32_t>at[0] << 24) | (<uint32_t>at[1] << 16) | (<uint32_t>at[2] << 8) | at[3]


cdef inline void _put32(uint8_t *at, uint32_t value) noexcept:
    at[0], at[1] = value >> 24, (value >> 16) & 0xFF
    at[2], at[3] = (value >> 8) & 0xFF, value & 0xFF


cdef inline void _put64(uint8_t *at, uint64_t value) noexcept:
    _put32(at, <uint32_t>(value >> 32))
    _put32(at + 4, <uint32_t>(value & <uint64_t>0xFFFFFFFF))


cdef inline const uint8_t *_octets(object data) noexcept:
    return <const uint8_t *>PyBytes_AS_STRING(data)


cdef inline bytes _cut(const uint8_t *octets, Py_ssize_t start, Py_ssize_t end):
    return PyBytes_FromStringAndSize(<const char *>octets + start, end - start)


cdef inline bint _is_number(object value, int64_t *number) except -1:
    """Read an int; False if it is another object or has more than 64 bits."""
    cdef int overflow = 0
    if value is None or not PyLong_CheckExact(value):
        return False
    number[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    return overflow == 0


cdef class Slots:
    """Places of the fields in the objects of a class.

    Raises TypeError if the class has other slots than those of these names.
    """

    cdef type owner
    cdef Py_ssize_t at[20]

    def __cinit__(self, type owner not None, tuple names not None):
        cdef PyMemberDef *member
        if len(names) > 20 or sorted(owner.__slots__) != sorted(names):
            raise TypeError(f"{owner.__name__} has other slots")
        for index, name in enumerate(names):
            descriptor = owner.__dict__[name]
            kind = type(descriptor)
            if <PyTypeObject *><PyObject *>kind != &PyMemberDescr_Type:
                raise TypeError(f"{owner.__name__}.{name} is no slot")
            member = (<PyMemberDescrObject *><PyObject *>descriptor).d_member
            if member.type != T_OBJECT_EX:
                raise TypeError(f"{owner.__name__}.{name} holds no object")
            self.at[index] = member.offset
        self.owner = owner

    cdef inline object get(self, object item, int field):
        """Return a field, None for an empty slot; the class of the object was checked."""
        cdef PyObject *found = (<PyObject **>(<char *><PyObject *>item + self.at[field]))[0]
        return None if found is NULL else <object>found

    cdef inline void set(self, object item, int field, object value) noexcept:
        cdef PyObject **slot = <PyObject **>(<char *><PyObject *>item + self.at[field])
        cdef PyObject *old = slot[0]
        Py_INCREF(value)
        slot[0] = <PyObject *>value
        Py_XDECREF(old)

    cdef inline bint is_number(self, object item, int field, int64_t *number) except -1:
        return _is_number(self.get(item, field), number)

    cdef bint are_none(self, object item, uint32_t fields) noexcept:
        """Return whether all fields of a set of bits are None."""
        cdef int field
        for field in range(20):
            if fields >> field & 1:
                if (<PyObject **>(<char *><PyObject *>item + self.at[field]))[0] != <PyObject *>None:
                    return False
        return True


cdef inline object _new(type owner, Py_ssize_t size=0):
    """Return an object with empty slots, or a tuple of a size with empty items.

    The garbage collector does not visit it: what messages, envelopes, rows and deliveries hold
    never holds them, so no cycle goes through one.
    """
    item = (<PyTypeObject *><PyObject *>owner).tp_alloc(owner, size)
    PyObject_GC_UnTrack(item)
    if size:
        POSTBUS_UNHASHED(<PyObject *>item)
    return item


cdef inline void _put_item(object row, Py_ssize_t index, object value) noexcept:
    Py_INCREF(value)
    PyTuple_SET_ITEM(row, index, value)


# --- frames ---------------------------------------------------------------------------------------

def scan_transfers(form, bytes data not None, Py_ssize_t pos, Py_ssize_t most_bytes):
    """Do all of `amqp.runs.scan_transfer_frames`."""
    cdef bytes head, kind, tail
    cdef Py_ssize_t least, size = len(data), frame_bytes
    _, head, kind, tail, least, _ = form
    cdef Py_ssize_t tag_at = 4 + len(head) + 6, tail_at = least - len(tail)
    cdef const uint8_t *octets = _octets(data)
    cdef const uint8_t *at
    cdef list ids = [], tags = [], payloads = []
    if pos < 0 or tail_at < tag_at or len(kind) != 2:
        raise ValueError("no form of a transfer")
    while least <= size - pos:
        at = octets + pos
        frame_bytes = _u32(at)
        if (
            not least <= frame_bytes <= most_bytes
            or frame_bytes > size - pos
            or memcmp(at + 4, _octets(head), len(head)) != 0
            or memcmp(at + tag_at - 2, _octets(kind), 2) != 0
            or memcmp(at + tail_at, _octets(tail), len(tail)) != 0
        ):
            break
        ids.append(_u32(at + tag_at - 6))
        tags.append(_cut(at, tag_at, tail_at))
        payloads.append(_cut(at, least, frame_bytes))
        pos += frame_bytes
    return ids, tags, payloads, pos


def scan_outcomes(form, bytes data not None, Py_ssize_t pos):
    """Do all of `amqp.runs.scan_outcome_frames`."""
    cdef bytes head, tail
    cdef Py_ssize_t frame_bytes, size = len(data)
    _, head, tail, frame_bytes, _ = form
    cdef Py_ssize_t first_at = 4 + len(head)
    cdef const uint8_t *octets = _octets(data)
    cdef const uint8_t *at
    cdef list ids = []
    if pos < 0 or frame_bytes != first_at + 9 + len(tail):
        raise ValueError("no form of an outcome")
    while frame_bytes <= size - pos:
        at = octets + pos
        if (
            _u32(at) != frame_bytes
            or memcmp(at + 4, _octets(head), len(head)) != 0
            or memcmp(at + first_at, at + first_at + 5, 4) != 0
            or at[first_at + 4] != 0x70
            or memcmp(at + first_at + 9, _octets(tail), len(tail)) != 0
        ):
            break
        ids.append(_u32(at + first_at))
        pos += frame_bytes
    return ids, pos


def pack_transfers(bytes head not None, bytes tail not None, int64_t first, list tags not None,
                   list parts not None, list payload_bytes not None):
    """Do all of `amqp.runs.pack_frames`, as one buffer.

    Raises ValueError if a tag has other than 16 octets, or the parts have other sizes.
    """
    cdef Py_ssize_t index, size, total = 0, count = len(tags)
    cdef Py_ssize_t overhead = 4 + len(head) + 6 + TAG_BYTES + len(tail)
    cdef tuple payload
    cdef uint8_t *at
    if len(parts) != count or len(payload_bytes) != count:
        raise ValueError("lists of a run have one length")
    for tag, payload, number in zip(tags, parts, payload_bytes):
        if not PyLong_CheckExact(number):
            raise ValueError("a size is no number")
        size = number
        total += overhead + size
        for part in payload:
            if not PyBytes_CheckExact(part):
                raise ValueError("a part is no bytes")
            size -= len(<bytes>part)
        if size != 0 or not PyBytes_CheckExact(tag) or len(<bytes>tag) != TAG_BYTES:
            raise ValueError("a tag or a payload has another size")
    cdef bytes frames = PyBytes_FromStringAndSize(NULL, total)
    at = <uint8_t *>PyBytes_AS_STRING(frames)
    for index in range(count):
        payload, size = parts[index], payload_bytes[index]
        _put32(at, <uint32_t>(overhead + size))
        memcpy(at + 4, _octets(head), len(head))
        at += 4 + len(head)
        _put32(at, <uint32_t>(first + index))
        at[4], at[5] = 0xA0, TAG_BYTES
        memcpy(at + 6, _octets(tags[index]), TAG_BYTES)
        memcpy(at + 6 + TAG_BYTES, _octets(tail), len(tail))
        at += 6 + TAG_BYTES + len(tail)
        for part in payload:
            memcpy(at, _octets(part), len(<bytes>part))
            at += len(<bytes>part)
    return frames


# --- messages -------------------------------------------------------------------------------------

cdef inline bint _is_section(const uint8_t *octets, Py_ssize_t size, Py_ssize_t pos, uint8_t code,
                             uint8_t form) noexcept:
    """Return whether a section of this code and form begins, with its first six octets."""
    cdef const uint8_t *at = octets + pos
    return size - pos >= 6 and (
        at[0] == 0x00 and at[1] == 0x53 and at[2] == code and at[3] == form
    )


cdef Py_ssize_t _id_bytes(const uint8_t *at, Py_ssize_t size, Py_ssize_t count) noexcept:
    """Return the size of the first property, -1 if it or one up to group-id is unusual."""
    cdef Py_ssize_t pos, index, id_bytes
    if size >= 1 and at[0] == 0x40:
        id_bytes = 1
    elif size >= 17 and at[0] == 0x98:
        id_bytes = 17
    elif size >= 2 and at[0] == 0xA1 and 2 + at[1] <= size:
        id_bytes = 2 + at[1]
        for pos in range(2, id_bytes):
            if at[pos] >= 0x80:
                return -1
    else:
        return -1
    if count <= 8:
        return id_bytes
    pos = id_bytes
    for index in range(1, min(count, 11)):
        if pos >= size or (index == 10 and at[pos] != 0x40):
            return -1
        if at[pos] == 0x40:
            pos += 1
        elif at[pos] == 0x83:
            pos += 9
        elif (at[pos] == 0xA1 or at[pos] == 0xA3) and pos + 1 < size:
            pos += 2 + at[pos + 1]
        else:
            return -1
    return id_bytes if pos <= size else -1


cdef inline uint8_t *_put_column(uint8_t *at, bytes value) except NULL:
    """Write a column of COPY, null if it is empty; return its end."""
    cdef Py_ssize_t size = len(value)
    _put32(at, <uint32_t>size if size else <uint32_t>0xFFFFFFFF)
    memcpy(at + 4, _octets(value), size)
    return at + 4 + size


cdef class Layout:
    """The usual sections before the properties of a delivery, with the places of what differs.

    `octets`: an example without annotations of the client. `places`, in this order: durable,
    failures, lock token, size and number of the annotations, sequence number, enqueued time, end of
    the lock. That of the token and of the lock's end are -1 without a lock.
    """

    cdef bytes octets
    cdef Py_ssize_t at[7]
    cdef Py_ssize_t most_annotation_bytes

    def __cinit__(self, bytes octets not None, tuple places not None,
                 Py_ssize_t most_annotation_bytes):
        cdef int index
        if len(places) != 7:
            raise ValueError("a layout has seven places")
        for index, size in enumerate((1, 1, TAG_BYTES, 2, 8, 8, 8)):
            if not (-1 if size == TAG_BYTES or index == 6 else 0) <= places[index] <= len(octets) - size:
                raise ValueError("a place is outside of the octets")
            self.at[index] = places[index]
        self.octets, self.most_annotation_bytes = octets, most_annotation_bytes

    cdef bytes prefix(self, bint is_durable, int64_t failures, bytes token, int64_t sequence,
                      int64_t enqueued_ms, int64_t until_ms, bytes annotations, int64_t count):
        """Return the sections of a delivery, None if an argument is unusual."""
        cdef Py_ssize_t size = len(self.octets), more = len(annotations)
        cdef const uint8_t *guid = _octets(token)
        cdef uint8_t *at
        if (
            more > self.most_annotation_bytes
            or not 0 <= failures <= 255
            or not 0 <= count <= 100
            or (self.at[2] >= 0 and len(token) != TAG_BYTES)
        ):
            return None
        cdef bytes prefix = PyBytes_FromStringAndSize(NULL, size + more)
        at = <uint8_t *>PyBytes_AS_STRING(prefix)
        memcpy(at, _octets(self.octets), size)
        memcpy(at + size, _octets(annotations), more)
        at[self.at[0]] = 0x41 if is_durable else 0x42
        at[self.at[1]] = <uint8_t>failures
        if more:
            at[self.at[3]] += <uint8_t>more
            at[self.at[3] + 1] += <uint8_t>(2 * count)
        _put64(at + self.at[4], <uint64_t>sequence)
        _put64(at + self.at[5], <uint64_t>enqueued_ms)
        if self.at[6] >= 0:
            _put64(at + self.at[6], <uint64_t>until_ms)
        if self.at[2] >= 0:  # the first three numbers of a .NET GUID are little-endian
            at += self.at[2]
            at[0], at[1], at[2], at[3] = guid[3], guid[2], guid[1], guid[0]
            at[4], at[5], at[6], at[7] = guid[5], guid[4], guid[7], guid[6]
            memcpy(at + 8, guid + 8, 8)
        return prefix


cdef class MessageRuns:
    """Functions of messages, which are objects of the class `envelope`.

    `heads`: the two octets before the properties in a row of a message that is not durable, and
    those of one that is.
    """

    cdef Slots slots
    cdef bytes empty, heads
    cdef Py_ssize_t least_bytes

    def __cinit__(self, type envelope not None, Py_ssize_t least_bytes, bytes heads not None):
        if len(heads) != 4:
            raise ValueError("two octets are before the properties")
        self.slots = Slots(envelope, ENVELOPE)
        self.empty, self.heads, self.least_bytes = b"", heads, least_bytes

    # --- arriving -----------------------------------------------------------------------------

    def slice_messages(self, list payloads not None):
        """Do the first messages of `message.sections.slice_message` that are usual.

        They have a header, properties and application properties in their short forms, or not at
        all, one data section, and no priority, TTL, session or annotations.
        """
        cdef list envelopes = []
        for payload in payloads:
            envelope = self._slice(<bytes>payload) if PyBytes_CheckExact(payload) else None
            if envelope is None:
                break
            envelopes.append(envelope)
        return envelopes

    cdef object _slice(self, bytes payload):
        cdef const uint8_t *octets = _octets(payload)
        cdef Py_ssize_t size = len(payload), pos = 0, after, at, count
        cdef bint is_durable = False
        message_id, properties, application = None, self.empty, self.empty
        if _is_section(octets, size, pos, 0x70, 0xC0):
            after, count, at = pos + 5 + octets[pos + 4], octets[pos + 5], pos + 6
            if after > size or at > after or count > after - at:
                return None
            if count:
                if not 0x40 <= octets[at] <= 0x42:
                    return None
                is_durable = octets[at] == 0x41
            if (count > 1 and octets[at + 1] != 0x40) or (count > 2 and octets[at + 2] != 0x40):
                return None
            pos = after
        if _is_section(octets, size, pos, 0x73, 0xC0):
            after, count, at = pos + 5 + octets[pos + 4], octets[pos + 5], pos + 6
            if after > size or at > after or count > after - at or (not count and at != after):
                return None
            properties = _cut(octets, pos, after)
            pos = after
            if count:
                count = _id_bytes(octets + at, after - at, count)
                if count < 0:
                    return None
                if octets[at] != 0x40:
                    message_id = _cut(octets, at, at + count)
        after = pos
        if _is_section(octets, size, pos, 0x74, 0xC1):
            after, count, at = pos + 5 + octets[pos + 4], octets[pos + 5], pos + 6
        elif size - pos >= 12 and _is_section(octets, size, pos, 0x74, 0xD1):
            after, at = pos + 8 + <Py_ssize_t>_u32(octets + pos + 4), pos + 12
            count = _u32(octets + pos + 8)
        if after > pos:
            if after > size or at > after or count > after - at or count & 1:
                return None
            application = _cut(octets, pos, after)
            pos = after
        if _is_section(octets, size, pos, 0x75, 0xA0):
            after = pos + 5 + octets[pos + 4]
        elif size - pos >= 8 and _is_section(octets, size, pos, 0x75, 0xB0):
            after = pos + 8 + <Py_ssize_t>_u32(octets + pos + 4)
        if after != size or after == pos:
            return None
        body = _cut(octets, pos, size) if pos else payload
        return self._fill(max(size, self.least_bytes), is_durable, message_id, properties,
                          application, body)

    cdef object _fill(self, size_bytes, is_durable, message_id, properties, application, body):
        cdef Slots slots = self.slots
        cdef int field
        envelope = _new(slots.owner)
        for field in range(VIA_PARTITION_KEY + 1):
            slots.set(envelope, field, None)
        slots.set(envelope, ANNOTATION_COUNT, 0)
        slots.set(envelope, ANNOTATIONS, self.empty)
        slots.set(envelope, APPLICATION_PROPERTIES, application)
        slots.set(envelope, BODY, body)
        slots.set(envelope, DELIVERY_ANNOTATIONS, self.empty)
        slots.set(envelope, HOP_COUNT, 0)
        slots.set(envelope, IS_DURABLE, is_durable)
        slots.set(envelope, MESSAGE_ID, message_id)
        slots.set(envelope, PROPERTIES, properties)
        slots.set(envelope, SIZE_BYTES, size_bytes)
        return envelope

    def name_messages(self, list envelopes not None, bytes head not None, bytes section not None,
                      numbers):
        """Do the first messages of `edge.message_ids.name_messages` that have an id or only a body.

        Return their number. An id is `head` and a number in 16 hexadecimal digits, `section` the
        octets before it in properties that hold nothing else.
        """
        cdef Slots slots = self.slots
        cdef Py_ssize_t done = 0, id_at = len(section), size = len(section) + len(head) + 16, digit
        cdef int64_t number = 0, size_bytes = 0
        cdef uint8_t *octets
        for envelope in envelopes:
            if type(envelope) is not slots.owner:
                break
            if slots.get(envelope, MESSAGE_ID) is None:
                if slots.get(envelope, PROPERTIES) != self.empty:
                    break
                if not slots.is_number(envelope, SIZE_BYTES, &size_bytes) or size_bytes >> 62:
                    break
                number = next(numbers)
                properties = PyBytes_FromStringAndSize(NULL, size)
                octets = <uint8_t *>PyBytes_AS_STRING(properties)
                memcpy(octets, _octets(section), id_at)
                memcpy(octets + id_at, _octets(head), len(head))
                for digit in range(16):
                    octets[size - 1 - digit] = b"0123456789abcdef"[(number >> (4 * digit)) & 0xF]
                slots.set(envelope, MESSAGE_ID, _cut(octets, id_at, size))
                slots.set(envelope, PROPERTIES, properties)
                slots.set(envelope, SIZE_BYTES, size_bytes + size)
            done += 1
        return done

    def unpack_rows(self, found, type row_type not None):
        """Do the first rows of `store.reads.Reader._stored` of active messages without a patch,
        whose envelopes are properties alone; `row_type`: class of a tuple of seven.
        """
        cdef list rows = []
        if not issubclass(row_type, tuple):
            raise TypeError("a row is a tuple")
        for record in found:
            if len(record) != 9:
                break
            blob, application, body = record[2], record[3], record[4]
            if (
                record[5] is not None or record[6] is not None or record[7] is not None
                or record[8] is not None or not PyBytes_CheckExact(blob)
            ):
                break
            envelope = self._unpack(<bytes>blob, self.empty if application is None else application,
                                    self.empty if body is None else body)
            if envelope is None:
                break
            row = _new(row_type, 7)
            _put_item(row, 0, record[0])
            _put_item(row, 1, record[1])
            _put_item(row, 2, None)
            _put_item(row, 3, 0)
            _put_item(row, 4, False)
            _put_item(row, 5, envelope)
            _put_item(row, 6, None)
            rows.append(row)
        return rows

    cdef object _unpack(self, bytes blob, bytes application, bytes body):
        """Return the envelope of a usual row, else None."""
        cdef const uint8_t *octets = _octets(blob)
        cdef Py_ssize_t size = len(blob), id_bytes
        message_id = None
        if size < 2:
            return None
        is_durable = memcmp(octets, _octets(self.heads) + 2, 2) == 0
        if not is_durable and memcmp(octets, _octets(self.heads), 2) != 0:
            return None
        if size > 2:
            if size < 9 or not _is_section(octets, size, 2, 0x73, 0xC0):
                return None
            id_bytes = _id_bytes(octets + 8, size - 8, 1)
            if id_bytes < 0:
                return None
            if octets[8] != 0x40:
                message_id = _cut(octets, 8, 8 + id_bytes)
        size += len(application) + len(body)
        return self._fill(max(size, self.least_bytes), is_durable, message_id,
                          _cut(octets, 2, len(blob)), application, body)

    # --- leaving ------------------------------------------------------------------------------

    cdef bint _is_own(self, envelope) except -1:
        """Return whether a message has no priority, was not forwarded, and its parts are bytes."""
        cdef Slots slots = self.slots
        cdef int64_t hops = 0
        return (
            type(envelope) is slots.owner
            and slots.are_none(envelope, PRIORITY_BIT | ORIGIN_BITS)
            and isinstance(slots.get(envelope, IS_DURABLE), bool)
            and slots.is_number(envelope, HOP_COUNT, &hops)
            and hops == 0
            and PyBytes_CheckExact(slots.get(envelope, DELIVERY_ANNOTATIONS))
            and len(<bytes>slots.get(envelope, DELIVERY_ANNOTATIONS)) == 0
            and PyBytes_CheckExact(slots.get(envelope, ANNOTATIONS))
            and PyBytes_CheckExact(slots.get(envelope, PROPERTIES))
            and PyBytes_CheckExact(slots.get(envelope, APPLICATION_PROPERTIES))
            and PyBytes_CheckExact(slots.get(envelope, BODY))
        )

    def pack_deliveries(self, deliveries, Layout layout not None,
                        list parts not None, list payload_bytes not None):
        """Do the first deliveries of `message.runs.pack_deliveries` without TTL and priority.

        Append the parts of each and the sum of their sizes; return the sum of the sizes of their
        envelopes.
        """
        cdef Slots slots = self.slots
        cdef int64_t until_ms = 0, sequence = 0, enqueued_ms = 0, failures = 0, count = 0, size = 0
        cdef int64_t total = 0
        cdef tuple row
        for delivery in deliveries:
            if not PyTuple_Check(delivery) or PyTuple_GET_SIZE(delivery) != 7:
                break
            row = <tuple>delivery
            token, envelope = row[0], row[6]
            if (
                not self._is_own(envelope)
                or row[5] is not None
                or not PyBytes_CheckExact(token)
                or not _is_number(row[1], &until_ms)
                or not _is_number(row[2], &sequence)
                or not _is_number(row[3], &enqueued_ms)
                or not _is_number(row[4], &failures)
                or not slots.is_number(envelope, ANNOTATION_COUNT, &count)
                or not slots.is_number(envelope, SIZE_BYTES, &size)
            ):
                break
            prefix = layout.prefix(
                slots.get(envelope, IS_DURABLE) is True, failures, <bytes>token, sequence,
                enqueued_ms, until_ms, <bytes>slots.get(envelope, ANNOTATIONS), count,
            )
            if prefix is None:
                break
            properties, body = slots.get(envelope, PROPERTIES), slots.get(envelope, BODY)
            application = slots.get(envelope, APPLICATION_PROPERTIES)
            parts.append((prefix, properties, application, body))
            payload_bytes.append(len(<bytes>prefix) + len(<bytes>properties)
                                 + len(<bytes>application) + len(<bytes>body))
            total += size
        return total

    def pack_rows(self, list rows not None):
        """Do the first rows of `message.rows.pack_rows` whose envelopes are properties alone.

        Return their octets and their number.
        """
        cdef Py_ssize_t size = 0, step
        cdef list usual = []
        cdef uint8_t *at
        for row in rows:
            step = self._row_bytes(row)
            if step == 0:
                break
            size += step
            usual.append(row)
        octets = PyBytes_FromStringAndSize(NULL, size)
        at = <uint8_t *>PyBytes_AS_STRING(octets)
        for row in usual:
            at = self._put_row(at, <tuple>row)
        return octets, len(usual)

    cdef Py_ssize_t _row_bytes(self, row) except -1:
        """Return the size of a row, 0 if it is unusual."""
        cdef Slots slots = self.slots
        cdef int64_t number = 0
        if not PyTuple_Check(row) or PyTuple_GET_SIZE(row) != 3:
            return 0
        envelope = (<tuple>row)[2]
        if (
            not self._is_own(envelope)
            or not _is_number((<tuple>row)[0], &number)
            or not _is_number((<tuple>row)[1], &number)
            or not slots.are_none(envelope, TTL_BIT | SCHEDULE_AND_KEYS)
            or not slots.is_number(envelope, ANNOTATION_COUNT, &number)
            or number
        ):
            return 0
        cdef bytes properties = slots.get(envelope, PROPERTIES)
        message_id = slots.get(envelope, MESSAGE_ID)
        if message_id is not None and (
            not PyBytes_CheckExact(message_id)
            or len(properties) < 6 + len(<bytes>message_id)
            or memcmp(_octets(properties), b"\x00\x53\x73\xc0", 4) != 0
            or memcmp(_octets(properties) + 6, _octets(message_id), len(<bytes>message_id)) != 0
        ):
            return 0
        return (
            ROW_BYTES + len(properties) + len(<bytes>slots.get(envelope, APPLICATION_PROPERTIES))
            + len(<bytes>slots.get(envelope, BODY))
        )

    cdef uint8_t *_put_row(self, uint8_t *at, tuple row) except NULL:
        """Write a usual row; return its end."""
        cdef Slots slots = self.slots
        cdef bytes properties = slots.get(row[2], PROPERTIES)
        cdef bint is_durable = slots.get(row[2], IS_DURABLE) is True
        memcpy(at, b"\x00\x05\x00\x00\x00\x08", 6)
        _put64(at + 6, <uint64_t><int64_t>row[0])
        _put32(at + 14, 8)
        _put64(at + 18, <uint64_t><int64_t>row[1])
        _put32(at + 26, <uint32_t>(len(properties) + 2))
        memcpy(at + 30, _octets(self.heads) + 2 * is_durable, 2)
        memcpy(at + 32, _octets(properties), len(properties))
        at = _put_column(at + 32 + len(properties), slots.get(row[2], APPLICATION_PROPERTIES))
        return _put_column(at, slots.get(row[2], BODY))


# --- queues ---------------------------------------------------------------------------------------

cdef class QueueRuns:
    """Functions of queued messages; `insert` and `delivery` are classes of tuples."""

    cdef Slots envelopes, messages
    cdef type insert, delivery

    def __cinit__(self, type envelope not None, type queued not None, type insert not None,
                 type delivery not None):
        if not issubclass(insert, tuple) or not issubclass(delivery, tuple):
            raise TypeError("rows and deliveries are tuples")
        self.envelopes, self.messages = Slots(envelope, ENVELOPE), Slots(queued, QUEUED)
        self.insert, self.delivery = insert, delivery

    def check(self, list envelopes not None, int64_t most_bytes, Py_ssize_t most_property_bytes,
              Py_ssize_t most_application_bytes):
        """Do the first checks of `entity.queues.queue_state.QueueState.enqueue`: of messages without
        schedule, session and keys.

        Return their number and the sum of their sizes.
        """
        cdef Slots slots = self.envelopes
        cdef Py_ssize_t count = 0
        cdef int64_t size = 0, total = 0
        for envelope in envelopes:
            if (
                type(envelope) is not slots.owner
                or not slots.is_number(envelope, SIZE_BYTES, &size)
                or not 0 <= size <= most_bytes
                or not slots.are_none(envelope, SCHEDULE_AND_KEYS)
                or len(slots.get(envelope, PROPERTIES)) > most_property_bytes
                or len(slots.get(envelope, APPLICATION_PROPERTIES)) > most_application_bytes
            ):
                break
            total += size
            count += 1
        return count, total

    def arrive(self, list envelopes not None, int64_t row_key, int64_t offset, enqueued_ms,
               list inserts not None):
        """Do all of `entity.queues.runs.arrive`: append rows, return the queued messages."""
        cdef list arrived = []
        for envelope in envelopes:
            key = row_key
            row = _new(self.insert, 3)
            _put_item(row, 0, key)
            _put_item(row, 1, enqueued_ms)
            _put_item(row, 2, envelope)
            inserts.append(row)
            arrived.append(self._queued(key, row_key + offset, enqueued_ms, envelope))
            row_key += 1
        return arrived

    def load(self, rows, int64_t offset):
        """Do all of `entity.queues.runs.load`: return the queued messages of rows."""
        cdef list loaded = []
        for row in rows:
            if not PyTuple_Check(row) or PyTuple_GET_SIZE(row) != 7:
                raise TypeError("rows are tuples of seven")
            key = (<tuple>row)[0]
            loaded.append(
                self._queued(key, <int64_t>key + offset, (<tuple>row)[1], (<tuple>row)[5])
            )
        return loaded

    cdef object _queued(self, row_key, sequence, enqueued_ms, envelope):
        """Return a queued message; the garbage collector will not visit its envelope either."""
        cdef Slots slots = self.messages
        if type(envelope) is self.envelopes.owner:
            PyObject_GC_UnTrack(envelope)
        message = _new(slots.owner)
        slots.set(message, ROW_KEY, row_key)
        slots.set(message, SEQUENCE, sequence)
        slots.set(message, ENQUEUED_MS, enqueued_ms)
        slots.set(message, LOADED, envelope)
        slots.set(message, FAILURES, 0)
        slots.set(message, RECORDED, 0)
        slots.set(message, TOKEN, None)
        slots.set(message, IS_DEFERRED, False)
        return message

    def lock(self, list batch not None, dict held not None, receiver, until_ms, int64_t first_key,
             bytes random_bytes not None, bytes suffix not None):
        """Do the first messages of `entity.queues.locks.lock` that have no TTL, did not fail and have
        a row key from `first_key` on; return their deliveries.
        """
        cdef Slots slots = self.messages
        cdef list deliveries = []
        cdef int64_t number = 0
        cdef Py_ssize_t start = 0
        if len(random_bytes) < 8 * len(batch):
            raise ValueError("fewer random bytes than tokens")
        for message in batch:
            if type(message) is not slots.owner:
                break
            envelope, failures = slots.get(message, LOADED), slots.get(message, FAILURES)
            if (
                type(envelope) is not self.envelopes.owner
                or self.envelopes.get(envelope, TTL_MS) is not None
                or not _is_number(failures, &number)
                or number
                or not slots.is_number(message, ROW_KEY, &number)
                or number < first_key
            ):
                break
            token = PyBytes_FromStringAndSize(NULL, 8 + len(suffix))
            memcpy(PyBytes_AS_STRING(token), _octets(random_bytes) + start, 8)
            memcpy(PyBytes_AS_STRING(token) + 8, _octets(suffix), len(suffix))
            start += 8
            slots.set(message, TOKEN, token)
            slots.set(message, RECEIVER, receiver)
            slots.set(message, LOCKED_UNTIL_MS, until_ms)
            held[token] = message
            delivery = _new(self.delivery, 7)
            _put_item(delivery, 0, token)
            _put_item(delivery, 1, until_ms)
            _put_item(delivery, 2, slots.get(message, SEQUENCE))
            _put_item(delivery, 3, slots.get(message, ENQUEUED_MS))
            _put_item(delivery, 4, failures)
            _put_item(delivery, 5, None)
            _put_item(delivery, 6, envelope)
            deliveries.append(delivery)
        return deliveries

    def complete(self, list tokens not None, dict held not None, int64_t now_ms,
                 list gone not None):
        """Do the first tokens of `entity.queues.locks.complete` whose messages are locked, loaded and
        share no body: append their row keys to `gone`, return their number and the sum of their sizes.
        """
        cdef Slots slots = self.messages
        cdef Py_ssize_t count = 0
        cdef int64_t until_ms = 0, size = 0, total = 0
        for token in tokens:
            message = held.get(token)
            if type(message) is not slots.owner:
                break
            envelope = slots.get(message, LOADED)
            if (
                type(envelope) is not self.envelopes.owner
                or self.envelopes.get(envelope, SHARED) is not None
                or not self.envelopes.is_number(envelope, SIZE_BYTES, &size)
                or not slots.is_number(message, LOCKED_UNTIL_MS, &until_ms)
                or until_ms <= now_ms
            ):
                break
            del held[token]
            slots.set(message, TOKEN, None)
            gone.append(slots.get(message, ROW_KEY))
            total += size
            count += 1
        return count, total
