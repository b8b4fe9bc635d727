// A launch: blocks in parallel over CPU threads, and the words that kernels call.
#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "block.hpp"

extern "C" __attribute__((weak)) void __asan_set_error_report_callback(void (*)(const char*));

namespace emulate {

__thread Thread* self = nullptr;
static const char* running = "";      // for a report of AddressSanitizer, which ends the process

static Block& home() { return *static_cast<Fiber*>(self)->home; }

void wait_for_block(Site site) { home().wait_for_block(site); }
void wait_for_warp(Site site, void* record, void (*complete)(void* const*)) {
  home().wait_for_warp(site, record, complete);
}
void wait_for_warp_in_order(Site site) { home().wait_for_warp_in_order(site); }
void wait_for_named(Site site, u32 id, u32 count) { home().meet_at_named(site, id, count, true); }
void arrive_at_named(Site site, u32 id, u32 count) { home().meet_at_named(site, id, count, false); }
void wait_until(Site site, bool (*ready)(const void*), const void* subject, bool elsewhere) {
  home().wait_until(site, ready, subject, elsewhere);
}
char* shared_memory(u64 bytes) { return home().shared_memory(bytes); }

void publish(const void* key) { home().publish(key); }
void observe(const void* key) { home().observe(key); }
void put_off(u32 to, const void* elements, u32 bytes) { home().put_off(to, elements, bytes); }
void close_group() { home().close_group(); }
void arrive_later(u32 to, u32 bytes, void* bar, void (*arrived)(void* bar, i32 bytes)) {
  home().arrive_later(to, bytes, bar, arrived);
}
bool take_up(u32 pending, u32* to, void* elements, u32* bytes) { return home().take_up(pending, to, elements, bytes); }

template <class T> static void add_atomically(T* p, T x, void* place) {
  home().access(reinterpret_cast<uintptr_t>(p), sizeof x, true, reinterpret_cast<uintptr_t>(place));
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  *p += x;
}
void add(float* p, float x) { add_atomically(p, x, __builtin_return_address(0)); }
void add(double* p, double x) { add_atomically(p, x, __builtin_return_address(0)); }

// An access to a count, from a place in the code.
static void access(const u32* p, bool writes, const void* place) {
  home().access(reinterpret_cast<uintptr_t>(p), sizeof *p, writes, reinterpret_cast<uintptr_t>(place));
}
u32 increment(u32* p) {
  access(p, true, __builtin_return_address(0));
  return __atomic_fetch_add(p, 1, __ATOMIC_ACQ_REL);
}
u32 load_acquire(const u32* p) {
  access(p, false, __builtin_return_address(0));
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
void wait_for_count(Site site, const u32* p, u32 x) {
  access(p, false, __builtin_return_address(0));
  struct Subject { const u32* p; u32 x; } subject{p, x};
  wait_until(site, [](const void* s) {
    const Subject& wanted = *static_cast<const Subject*>(s);
    return __atomic_load_n(wanted.p, __ATOMIC_ACQUIRE) >= wanted.x;
  }, &subject, true);
}

void fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  home().fault(format, arguments);
}

static void name_thread(const char*) {
  if (self) std::fprintf(stderr, "kernel %s, block %u, thread %u\n", running, self->block, self->index);
}

static void set_subnormals(bool flush) {
#if defined(__x86_64__)
  if (flush) __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);     // results and operands
#else
  (void)flush;
#endif
}

static int launch(const Launch& launch) {
  std::vector<u32> order(launch.grid);
  std::iota(order.begin(), order.end(), 0u);
  if (launch.seed != 0) Random{launch.seed}.shuffle(order);
  std::atomic<u32> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  running = launch.kernel;
  if (__asan_set_error_report_callback) __asan_set_error_report_callback(name_thread);
  auto work = [&] {
    set_subnormals(launch.flush_subnormals);
    Block block(launch);
    for (u32 n; !failed && (n = next++) < launch.grid;) {
      if (block.run(order[n])) continue;
      const std::lock_guard<std::mutex> lock(mutex);
      if (failed.exchange(true)) return;
      std::snprintf(launch.message, launch.message_bytes, "%s", block.message().c_str());
    }
  };
  std::vector<std::thread> workers;
  for (u32 n = 0; n < launch.workers; ++n) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
  return failed;
}

}  // namespace emulate

// 0, or 1 with the first fault in launch->message.
extern "C" __attribute__((visibility("default"))) int cupyflash_emulate_launch(const emulate::Launch* launch) {
  return emulate::launch(*launch);
}
