"""Triton's interpreter, for kernels on a machine without a GPU: set up before Triton is imported.

It rounds to bfloat16 wrongly, and multiplies its bits as integers; ``repair`` has ml_dtypes do that. Kernels round to
FP8 by themselves there. What it does again and again for the same outcome, more than half of its time, is left out.
"""

import dataclasses
import importlib
import inspect
import os

import ml_dtypes
import numpy as np

_DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
_DOT_DTYPES = {"bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}

_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_NUMBERS = _INTEGERS | {"fp16", "fp32", "fp64"}
_ADDING = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_FUNCTIONS = {
    **{name: (compute, _NUMBERS) for name, compute in _ADDING.items()},
    "minimum": (np.minimum, _NUMBERS),
    "maximum": (np.maximum, _NUMBERS),
    "umulhi": (lambda x, y: (x.astype(np.uint64) * y >> 32).astype(np.uint32), {"uint32"}),
}
_OPERATORS = {
    **{f"__{name}__": (compute, _NUMBERS) for name, compute in _ADDING.items()},
    "__radd__": (np.add, _NUMBERS),
    "__rmul__": (np.multiply, _NUMBERS),
    "__floordiv__": (lambda x, y: (x - np.fmod(x, y)) // y, _INTEGERS),
    "__mod__": (np.fmod, _INTEGERS),
    "__lt__": (np.less, _NUMBERS),
    "__le__": (np.less_equal, _NUMBERS),
    "__gt__": (np.greater, _NUMBERS),
    "__ge__": (np.greater_equal, _NUMBERS),
    "__eq__": (np.equal, _NUMBERS),
    "__ne__": (np.not_equal, _NUMBERS),
    "__and__": (np.bitwise_and, _INTEGERS | {"int1"}),
    "__or__": (np.bitwise_or, _INTEGERS | {"int1"}),
    "__xor__": (np.bitwise_xor, _INTEGERS | {"int1"}),
    "__lshift__": (np.left_shift, _INTEGERS),
    "__rshift__": (np.right_shift, _INTEGERS),
}
_PROMOTES = {np.add, np.subtract, np.multiply}  # integers, and numpy does as Triton, or the result is of another type


def use():
    """Run kernels in the interpreter from now on, if Triton is there."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        interpreter = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return
    repair(interpreter)
    patch_once(interpreter)
    remember_dtypes(interpreter)
    remember_types(interpreter.tl.core)
    ask_less(interpreter)
    # What it checks is dropped again where Triton does not debug
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def repair(interpreter):
    """Round to bfloat16 as hardware does; count loops by arrays of one number, as Triton 3.6 and NumPy 2.4 refuse."""
    theirs, of_tensors = interpreter._convert_float, interpreter._patch_lang_tensor

    def patch_tensors(tensor, scope):
        of_tensors(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensors

    def convert(x, source, target, rounding):
        names = str(source), str(target)
        if not set(names) <= set(_DTYPES):
            return theirs(x, source, target, rounding)
        values = np.ascontiguousarray(x).view(_DTYPES[names[0]])
        with np.errstate(over="ignore", invalid="ignore"):
            result = values.astype(_DTYPES[names[1]])
        return result.view(f"uint{8 * result.itemsize}").reshape(x.shape)

    interpreter._convert_float = convert

    def values(operand):
        """Return the elements of a factor as fp32."""
        dtype = _DOT_DTYPES.get(str(operand.dtype.scalar))
        return operand.data if dtype is None else np.ascontiguousarray(operand.data).view(dtype).astype(np.float32)

    def create_dot(builder, a, b, d, *_):
        product = np.matmul(values(a), values(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def patch_once(interpreter):
    """Patch Triton's language for good: each launch does it and undoes it, and each call of a device function again."""
    patch, patched, seen_by = interpreter._patch_lang, set(), {}
    languages = interpreter.tl, interpreter.tl.core

    def modules(names):
        if id(names) not in seen_by:
            seen_by[id(names)] = {m.__name__ for m in names.values() if inspect.ismodule(m) and m in languages}
        return seen_by[id(names)]

    def patch_new(fn):
        if not modules(fn.__globals__) <= patched:
            patch(fn)
            patched.update(modules(fn.__globals__))
        return interpreter._LangPatchScope()  # with nothing to undo

    interpreter._patch_lang = patch_new


def remember_dtypes(interpreter):
    """Look up which numpy dtype stands for Triton's, not make the table of them each time."""
    theirs, known = interpreter._get_np_dtype, {}

    def dtype_of(dtype):
        scalar = dtype.scalar
        if scalar.is_ptr():
            return theirs(scalar)
        if scalar not in known:
            known[scalar] = theirs(scalar)
        return known[scalar]

    interpreter._get_np_dtype = dtype_of


def remember_types(core):
    """Have one type of each kind of block, which knows the shape that its tensors show; types of tuples when asked."""
    made, begin, to_ir = {}, core.block_type.__init__, core.block_type.to_ir

    def one_of_each(cls, element_ty, shape):
        key = element_ty.name, getattr(element_ty, "address_space", None), *shape
        if key not in made:
            unwrapped = *key[:2], *map(core._unwrap_if_constexpr, shape)
            made[key] = made.setdefault(unwrapped, object.__new__(cls))
        return made[key]

    def begin_once(self, element_ty, shape):
        if not hasattr(self, "numel"):
            begin(self, element_ty, shape)
            self.numbers, self.sizes = {}, tuple(map(int, self.shape))  # see ask_less
            self.shown = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in self.shape])

    def ir_once(self, builder):
        if not hasattr(self, "ir"):
            self.ir = to_ir(self, builder)
        return self.ir

    equal = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.block_type.__new__, core.block_type.__init__, core.block_type.to_ir = one_of_each, begin_once, ir_once
    core.dtype.shown = core.constexpr(1), core.tuple([])

    def begin_tensor(self, handle, type):
        self.handle, self.type = handle, type
        self.numel, self.shape = type.shown
        self.dtype = type.element_ty if type.__class__ is core.block_type else type

    core.tensor.__init__ = begin_tensor

    def begin_tuple(self, args, type=None):
        self.values = [*args]
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def type_of_tuple(self):
        if "_type" not in self.__dict__:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    core.tuple.__init__ = begin_tuple
    core.tuple.type = property(type_of_tuple, lambda self, type: setattr(self, "_type", type))
    unwrap = core._unwrap_if_constexpr

    def unwrap_numbers_first(o):
        if o.__class__ is core.constexpr:
            return o.value
        return o if o.__class__ in (int, core.tensor) else unwrap(o)

    core._unwrap_if_constexpr = unwrap_numbers_first


def ask_less(interpreter):
    """Let operands through that are alike already, keep what a number is beside a block of a type, and call what
    kernels call without two functions in between.
    """
    semantic, tensor = interpreter.interpreter_semantic, interpreter.tl.core.tensor
    shorter = compute_at_once(interpreter)
    check, broadcast, of_scalars = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value, {}

    def check_unlike(lhs, rhs, *ways, **named_ways):
        if isinstance(lhs, tensor):
            if not isinstance(rhs, tensor):
                return beside(lhs, rhs, False, ways, named_ways)
            if lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr() and not named_ways and len(ways) < 3:
                return (lhs, rhs) if lhs.type is rhs.type else broadcast_unlike(lhs, rhs)
        elif isinstance(rhs, tensor):
            return beside(rhs, lhs, True, ways, named_ways)[::-1]
        return check(lhs, rhs, *ways, **named_ways)

    def beside(operand, number, first, ways, named_ways):
        signed = number or repr(number)  # zeros are equal, and not alike
        of_type, key = operand.type, (number.__class__, signed, first, ways, *named_ways.items())
        known = of_type.numbers if of_type.is_block() else of_scalars.setdefault(of_type.name, {})
        if key in known:
            data, dtype, type_ = known[key]
            return operand, tensor(interpreter.TensorHandle(data, dtype), type_)
        made, other = check(*((number, operand) if first else (operand, number)), *ways, **named_ways)[:: 1 - 2 * first]
        if made is operand and isinstance(number, (int, float)):  # which had to become nothing else
            data = np.broadcast_to(other.handle.data.reshape(-1)[:1], other.handle.data.shape)  # nobody writes to it
            known[key] = data, other.handle.dtype, other.type
        return made, other

    def spread(scalar, block):
        of_block, data = block.type.with_element_ty(scalar.dtype), np.broadcast_to(scalar.handle.data, block.type.sizes)
        return tensor(interpreter.TensorHandle(data, scalar.dtype), of_block)

    def broadcast_unlike(lhs, rhs):
        if not lhs.type.is_block():
            return (spread(lhs, rhs), rhs) if rhs.type.is_block() else (lhs, rhs)
        if not rhs.type.is_block():
            return lhs, spread(rhs, lhs)
        return (lhs, rhs) if lhs.type.sizes == rhs.type.sizes else broadcast(lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = check_unlike, broadcast_unlike

    def patch(obj, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)  # not one that looks whether ``_semantic`` is given

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, shorter(obj, name, call))

    interpreter._patch_attr = patch
    to_tensor, device_function = semantic.to_tensor, interpreter.InterpretedFunction

    def unless_tensor(x, *check_type):
        return x if x.__class__ is tensor else to_tensor(x, *check_type)

    def call_rewritten(self, *args, **kwargs):
        if "rewritten" not in self.__dict__:
            interpreter._patch_lang(self.fn)
            self.rewritten = self.rewrite()
        try:
            return self.rewritten(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    semantic.to_tensor, device_function.__call__ = unless_tensor, call_rewritten
    widths = {}

    def begin_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if dtype.name not in widths:  # pointers are as wide as numbers are at most
            widths[dtype.name] = 8 if dtype.is_ptr() else max(1, dtype.primitive_bitwidth // 8)
        if data.itemsize > widths[dtype.name]:
            raise ValueError(f"elements of {data.itemsize} bytes are not {dtype}")

    interpreter.TensorHandle.__init__ = begin_handle


def compute_at_once(interpreter):
    """Return what has numpy compute at once where Triton has said before of which type the result of such types is.

    Operands of one type of element need no cast, and numpy broadcasts them as Triton does.
    """
    core, handle, dtype_of = interpreter.tl.core, interpreter.TensorHandle, interpreter._get_np_dtype
    tensor, check = core.tensor, interpreter.interpreter_semantic.binary_op_type_checking_impl
    numbers = {}

    def array_beside(operand, number):
        """Return a number as an array of the operand's type of element, or None if the two would become another."""
        key = operand.dtype.name, number.__class__, number or repr(number)  # zeros are equal, but for their sign
        if key not in numbers:
            same, other = check(operand, number)
            alike = same is operand and other.dtype == operand.dtype
            numbers[key] = other.handle.data.reshape(-1)[:1] if alike else None
        return numbers[key]

    def known_before(compute, call):
        """Compute arrays for the call, of operands of types that it was given before."""
        known = {}

        def computed(arrays, types, *args):
            key = tuple(map(id, types))
            if key in known:
                result = compute(*arrays)
                type_, dtype, _ = known[key]
                return tensor(handle(result, type_.scalar), type_) if result.dtype is dtype else call(*args)
            result = call(*args)
            known[key] = result.type, dtype_of(result.dtype), types  # whose ids are theirs as long as they are kept
            return result

        return computed

    def of_two(compute, elements, call):
        computed = known_before(compute, call)

        def operator(x, y, *ways, **named_ways):
            if x.__class__ is tensor and not ways and (not named_ways or named_ways == unchecked):
                name, y = x.dtype.name, y.value if y.__class__ is core.constexpr else y
                if y.__class__ is tensor:
                    other = y.dtype.name
                    if name == other and name in elements:
                        return computed((x.handle.data, y.handle.data), (x.type, y.type), x, y)
                    if compute in _PROMOTES and other in _INTEGERS:
                        if name in _INTEGERS:
                            return computed((x.handle.data, y.handle.data), (x.type, y.type), x, y)
                        if compute is np.add and x.type is x.dtype and x.dtype.__class__ is core.pointer_type:
                            return behind(x, y, call)
                elif (y.__class__ is int or y.__class__ is float) and name in elements:
                    array = array_beside(x, y)
                    if array is not None:
                        return computed((x.handle.data, array), (x.type, y.__class__), x, y)
            return call(x, y, *ways, **named_ways)

        return operator

    behinds, unchecked = {}, {"sanitize_overflow": False}

    def behind(pointer, offset, call):
        """Add an offset to one pointer: new types of pointers are made at each launch, blocks of them are not."""
        key = pointer.dtype.name, id(offset.type)
        if key not in behinds:
            result = call(pointer, offset)
            width = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
            behinds[key] = result.type, width, offset.type
            return result
        type_, width, _ = behinds[key]
        data = pointer.handle.data + width * offset.handle.data.astype(np.uint64)
        return tensor(handle(data, type_.scalar), type_)

    def indexing(call):
        known = {}

        def getitem(x, slices, **_):
            parts = slices.values if slices.__class__ is core.tuple else None
            if parts is None or not all(part is None or part == slice(None) for part in parts):
                return call(x, slices)
            key = id(x.type), tuple([part is None for part in parts])
            if key in known:
                type_, index, _ = known[key]
                return tensor(handle(x.handle.data[index], x.dtype), type_)
            result = call(x, slices)
            known[key] = result.type, tuple(parts), x.type
            return result

        return getitem

    def reshaping(call):
        known = {}

        def reshape(x, *shape, **named_ways):
            sizes = shape[0] if len(shape) == 1 else shape
            sizes = sizes.values if sizes.__class__ is core.tuple else sizes
            if sizes.__class__ is not list or named_ways or x.__class__ is not tensor:
                return call(x, *shape, **named_ways)
            key = id(x.type), tuple([getattr(size, "value", size) for size in sizes])
            if key in known:
                type_, _ = known[key]
                return tensor(handle(x.handle.data.reshape(type_.sizes), x.dtype), type_)
            result = call(x, *shape)
            if result.type.is_block():
                known[key] = result.type, x.type
            return result

        return reshape

    def choosing(call):
        computed = known_before(np.where, call)

        def where(condition, x, y, **_):
            operand = x if x.__class__ is tensor else y
            if operand.__class__ is tensor and operand.dtype.name in _NUMBERS and condition.__class__ is tensor:
                arrays, types = [condition.handle.data], [condition.type]
                for value in (x, y):
                    if value.__class__ is tensor:
                        array = value.handle.data if value.dtype.name == operand.dtype.name else None
                        types.append(value.type)
                    else:
                        array = array_beside(operand, value) if value.__class__ in (int, float) else None
                        types.append(value.__class__)
                    arrays.append(array)
                if condition.dtype.name == "int1" and arrays[1] is not None and arrays[2] is not None:
                    return computed(arrays, types, condition, x, y)
            return call(condition, x, y)

        return where

    def casting(call):
        known = {}

        def to(x, dtype, fp_downcast_rounding=None, bitcast=False, **_):
            key = id(x.type), id(dtype), bitcast
            if key in known and fp_downcast_rounding is None:
                type_, np_dtype = known[key][:2]
                data = x.handle.data.view(np_dtype) if bitcast else x.handle.data.astype(np_dtype)
                return tensor(handle(data, type_.scalar), type_)
            result = call(x, dtype, fp_downcast_rounding, bitcast)
            both = {x.dtype.name, result.dtype.name}
            if dtype.__class__ is core.dtype and result is not x and (bitcast is True or both <= _NUMBERS):
                known[key] = result.type, dtype_of(result.dtype), x.type, dtype
            return result

        return to

    def shorter(obj, name, call):
        methods = {"to": casting, "__getitem__": indexing}
        functions = {"where": choosing, "reshape": reshaping}
        kinds, of_types = (methods, _OPERATORS) if obj is tensor else (functions, _FUNCTIONS)
        if name in of_types:
            return of_two(*of_types[name], call)
        return kinds[name](call) if name in kinds else call

    return shorter
