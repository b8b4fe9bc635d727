// A block on one CPU thread: its fibers, where they wait, and whose turn it is.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "engine.cuh"
#include "fiber.hpp"
#include "races.hpp"

namespace emulate {

struct Range { const char* name; uintptr_t begin, end; u32 writable; };     // memory that a launch may touch

// What cupyflash/cuda/emulate fills in, in its order.
struct Launch {
  const char* kernel;
  void* const* arguments;
  const Range* ranges;
  u64 range_count;                // 0: any address is good
  u64 seed;                       // 0: blocks, warps and lanes in their natural order
  u32 grid, threads, shared_bytes, workers;
  u32 flush_subnormals;           // as under -ftz=true
  u32 checked;                    // whether the kernel was built with its memory accesses announced
  char* message;
  u64 message_bytes;
};

extern "C" void cupyflash_emulate_entry(void* const* arguments);

struct Random {                   // splitmix64 (Steele et al. 2014)
  u64 state;
  u64 next() {
    u64 z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  template <class T> void shuffle(std::vector<T>& list) {
    for (size_t n = list.size(); n > 1; --n) std::swap(list[n - 1], list[next() % n]);
  }
};

class Block;

struct Copy { u32 to, bytes, group; char elements[16]; };       // of cp.async, until it is waited for

struct Load {                     // of TMA, until it arrives
  u32 to;
  std::string bytes;
  void* bar;
  void (*arrived)(void* bar, i32 bytes);
};

struct Fiber : Thread {
  enum State { kRunnable, kWaiting, kReturned };
  Block* home = nullptr;
  char* stack = nullptr;
  Context context;
  void* fake = nullptr;
  State state = kRunnable;
  Site site{};                                  // where it waits
  bool (*ready)(const void*) = nullptr;         // what it polls while it waits
  bool elsewhere = false;                       // whether another block changes it
  const void* subject = nullptr;
  std::deque<Copy> copies;
  u32 group = 0;                                // the one that is open
};

class Block {
 public:
  Block(const Launch& launch);
  ~Block() { std::free(allocation_); }
  // Executes block `index` to its end; false: stopped by a fault, told in message().
  bool run(u32 index);
  const std::string& message() const { return message_; }

  void wait_for_block(Site site);
  void wait_for_warp(Site site, void* record, void (*complete)(void* const*));
  void wait_for_warp_in_order(Site site);
  void meet_at_named(Site site, u32 id, u32 count, bool stays);
  void wait_until(Site site, bool (*ready)(const void*), const void* subject, bool elsewhere);
  char* shared_memory(u64 bytes);
  void publish(const void* key);
  void observe(const void* key);
  void put_off(u32 to, const void* elements, u32 bytes);
  void close_group() { ++current().group; }
  bool take_up(u32 pending, u32* to, void* elements, u32* bytes);
  void arrive_later(u32 to, u32 bytes, void* bar, void (*arrived)(void*, i32));
  [[noreturn]] void fault(const char* format, va_list arguments);
  void access(uintptr_t address, size_t size, bool writes, uintptr_t place);

 private:
  struct Meeting { Site site{}; u32 here = 0; };
  struct Warp { Meeting meeting; void* records[32]; };
  struct Named { u32 count = 0, here = 0; Clock clock; std::vector<u32> waiting; };

  static void body();
  void resume(Fiber& fiber);
  void leave();
  void wait(Site site);
  void join(Meeting& meeting, Site site);
  void release(u32 first, u32 count);
  bool run_warp(u32 warp);
  bool let_a_load_arrive();
  bool others_may_help(u32& patience) const;
  std::string who_waits_where() const;

  Fiber& current() { return static_cast<Fiber&>(*self); }
  bool seeded() const { return launch_.seed != 0; }

  const Launch& launch_;
  const Range* last_range_ = nullptr;           // where the last access was
  Stacks stacks_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<u32> warp_order_, lane_order_;
  Meeting barrier_;
  Named named_[16];
  Random random_{0};
  Races races_;
  std::map<const void*, Clock> published_;
  std::vector<Load> loads_;
  void* allocation_ = nullptr;
  char* shared_;
  u32 returned_ = 0;
  bool faulted_ = false;
  std::string message_;
  Context scheduler_;
  void* scheduler_fake_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
};

}  // namespace emulate
