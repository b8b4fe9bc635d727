// Fibers: a stack each, and a switch that costs a few nanoseconds.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// Present in a process with AddressSanitizer alone: it must learn of every change of stack.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void**, const void*, size_t);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, size_t);
}

namespace emulate {

#if defined(__x86_64__)

extern "C" __attribute__((visibility("hidden"))) void cupyflash_switch(void** from, void* to);      // fiber.cpp

class Context {
 public:
  void start(char* stack, size_t bytes, void (*body)()) {
    void** top = reinterpret_cast<void**>(stack + bytes);
    *--top = nullptr;                                      // where body would return to
    *--top = reinterpret_cast<void*>(body);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack_pointer_ = top;
  }
  void switch_to(Context& other) { cupyflash_switch(&stack_pointer_, other.stack_pointer_); }

 private:
  void* stack_pointer_ = nullptr;
};

#else

class Context {
 public:
  void start(char* stack, size_t bytes, void (*body)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, body, 0);
  }
  void switch_to(Context& other) { swapcontext(&context_, &other.context_); }

 private:
  ucontext_t context_;
};

#endif

// One mapping for all stacks of a block, each above a page that may not be touched.
class Stacks {
 public:
  static constexpr size_t kBytes = 256 << 10;

  explicit Stacks(size_t count) : count_(count), page_(size_t(sysconf(_SC_PAGESIZE))) {
    void* memory = mmap(nullptr, bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
    for (size_t n = 0; n < count; ++n) {
      if (mprotect(of(n), kBytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    }
  }
  Stacks(const Stacks&) = delete;
  ~Stacks() { munmap(memory_, bytes()); }

  char* of(size_t n) const { return memory_ + n * (kBytes + page_) + page_; }
  bool contain(uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(memory_) < bytes(); }
  // Fibers that were left in the middle must not leave their marks to the next ones.
  void forget() const {
    if (!__asan_unpoison_memory_region) return;
    for (size_t n = 0; n < count_; ++n) __asan_unpoison_memory_region(of(n), kBytes);
  }

 private:
  size_t bytes() const { return count_ * (kBytes + page_); }
  size_t count_, page_;
  char* memory_;
};

// Goes from one stack to another and says so to AddressSanitizer. `fake` belongs to the stack that is left.
inline void switch_stacks(Context& from, Context& to, void** fake, const void* stack, size_t bytes) {
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(fake, stack, bytes);
  from.switch_to(to);
}
inline void arrived(void* fake, const void** from_stack, size_t* from_bytes) {
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake, from_stack, from_bytes);
}

}  // namespace emulate
