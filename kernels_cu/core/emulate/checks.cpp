// What a kernel built with -fsanitize=thread and -fsanitize=undefined calls before it touches memory. No runtime of
// either sanitizer is linked: the calls end here, where the launch knows which memory is whose.
#include <cstring>

#include "block.hpp"

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;     // the image of this shared object
extern "C" __attribute__((visibility("hidden"))) const char _end;

namespace emulate {

static uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// `place` is an address in the code: <+0x..> in a message, which the launcher turns into file and line.
void Block::access(uintptr_t address, size_t size, bool writes, uintptr_t place) {
  if (!launch_.checked) return;
  const unsigned where = unsigned(place - address_of(&__ehdr_start) - 1);
  const char* verb = writes ? "writes" : "reads";
  const uintptr_t offset = address - address_of(shared_);
  if (offset < launch_.shared_bytes) {
    if (offset + size > launch_.shared_bytes) {
      emulate::fault("%s %zu bytes at byte %zu of %u bytes of shared memory at <+0x%x>", verb, size, size_t(offset),
                     launch_.shared_bytes, where);
    }
    if (const Access* other = races_.enter(current().index, offset, size, writes, where)) {
      emulate::fault("%s %zu bytes at byte %zu of shared memory at <+0x%x>, "
                     "unordered with thread %u at <+0x%x>: a race",
                     verb, size, size_t(offset), where, unsigned(other->thread), other->place);
    }
    return;
  }
  if (stacks_.contain(address) || launch_.range_count == 0) return;
  auto inside = [=](const Range& range) { return address >= range.begin && address + size <= range.end; };
  if (last_range_ && inside(*last_range_) && (!writes || last_range_->writable)) return;
  const Range *nearest = nullptr, *forbidden = nullptr;
  uintptr_t least = ~uintptr_t(0);
  for (const Range* range = launch_.ranges; range < launch_.ranges + launch_.range_count; ++range) {
    if (inside(*range)) {
      if (!writes || range->writable) return void(last_range_ = range);
      forbidden = range;
    }
    const uintptr_t distance = address < range->begin ? range->begin - address : address + size - range->end;
    if (distance < least) nearest = range, least = distance;
  }
  if (forbidden) emulate::fault("writes to %s, which is an input, at <+0x%x>", forbidden->name, where);
  if (!writes && address >= address_of(&__ehdr_start) && address + size <= address_of(&_end)) return;
  if (least < (1u << 20)) {
    const bool before = address < nearest->begin;
    emulate::fault("%s %zu bytes outside every array, %zu bytes %s %s, at <+0x%x>", verb, size, size_t(least),
                   before ? "before the begin of" : "beyond the end of", nearest->name, where);
  }
  emulate::fault("%s %zu bytes at address %#zx, outside every array, at <+0x%x>", verb, size, size_t(address), where);
}

static void announce(const void* address, size_t size, bool writes, const void* place) {
  Fiber* fiber = static_cast<Fiber*>(self);
  if (!fiber || address_of(address) - address_of(fiber->stack) < Stacks::kBytes) return;
  fiber->home->access(address_of(address), size, writes, address_of(place));
}

}  // namespace emulate

#define ACCESS(size)                                                                                                   \
  void __tsan_read##size(void* p) { emulate::announce(p, size, false, __builtin_return_address(0)); }                  \
  void __tsan_write##size(void* p) { emulate::announce(p, size, true, __builtin_return_address(0)); }                  \
  void __tsan_unaligned_read##size(void* p) { emulate::announce(p, size, false, __builtin_return_address(0)); }        \
  void __tsan_unaligned_write##size(void* p) { emulate::announce(p, size, true, __builtin_return_address(0)); }

// Undefined behaviour: the first argument of each begins with file, line and column.
struct SourceLocation { const char* file; unsigned line, column; };
#define UNDEFINED(name, text)                                                                                          \
  [[noreturn]] void __ubsan_handle_##name##_abort(const SourceLocation* at) {                                          \
    emulate::fault("%s at %s:%u:%u", text, at->file, at->line, at->column);                                            \
  }

extern "C" {

void __tsan_init() {}
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, unsigned long n) { emulate::announce(p, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, unsigned long n) { emulate::announce(p, n, true, __builtin_return_address(0)); }

UNDEFINED(out_of_bounds, "an array index out of bounds")
UNDEFINED(shift_out_of_bounds, "a shift by too much")
UNDEFINED(add_overflow, "a signed sum that overflows")
UNDEFINED(sub_overflow, "a signed difference that overflows")
UNDEFINED(mul_overflow, "a signed product that overflows")
UNDEFINED(negate_overflow, "a negation that overflows")
UNDEFINED(divrem_overflow, "a division by zero, or one that overflows")
UNDEFINED(load_invalid_value, "a value that its type does not have")
UNDEFINED(float_cast_overflow, "a conversion of a number too large")
UNDEFINED(pointer_overflow, "pointer arithmetic that overflows")
UNDEFINED(nonnull_arg, "a null argument")
UNDEFINED(invalid_builtin, "a builtin with an argument it does not take")
[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const SourceLocation* at, const void* address) {
  emulate::fault("a misaligned or null address %p at %s:%u:%u", address, at->file, at->line, at->column);
}
[[noreturn]] void __ubsan_handle_builtin_unreachable(const SourceLocation* at) {
  emulate::fault("unreachable code reached at %s:%u:%u", at->file, at->line, at->column);
}
[[noreturn]] void __ubsan_handle_missing_return(const SourceLocation* at) {
  emulate::fault("a missing return at %s:%u:%u", at->file, at->line, at->column);
}

}  // extern "C"
