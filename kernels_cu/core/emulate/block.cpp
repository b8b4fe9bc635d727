// The scheduler and the collectives.
#include "block.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace emulate {

constexpr size_t kSharedAlignment = 1024;       // what the widest swizzle wants
constexpr u32 kPatience = 600000;               // 100 us each that a block which cannot go on waits for the others

Block::Block(const Launch& launch)
    : launch_(launch), stacks_(launch.threads), fibers_(launch.threads), warps_(launch.threads / 32) {
  // Between bytes that belong to no array when addresses are looked up in ranges; else exactly as long as asked for, so
  // that AddressSanitizer sees an access behind it.
  const size_t guard = launch.checked ? kSharedAlignment : 0;
  const size_t bytes = std::max<size_t>(launch.shared_bytes, 1);
  if (posix_memalign(&allocation_, kSharedAlignment, guard + bytes + guard) != 0) throw std::bad_alloc();
  shared_ = static_cast<char*>(allocation_) + guard;
  for (u32 n = 0; n < launch.threads / 32; ++n) warp_order_.push_back(n);
  for (u32 n = 0; n < 32; ++n) lane_order_.push_back(n);
}

bool Block::run(u32 index) {
  random_.state = launch_.seed * 0x2545f4914f6cdd1du + index;
  std::memset(shared_, 0xff, launch_.shared_bytes);      // NaN in every format
  if (launch_.checked) races_.start(launch_.shared_bytes, launch_.threads);
  stacks_.forget();
  published_.clear();
  loads_.clear();
  barrier_ = {};
  for (Named& named : named_) named = {};
  for (Warp& warp : warps_) warp.meeting = {};
  for (u32 n = 0; n < launch_.threads; ++n) {
    Fiber& fiber = fibers_[n];
    fiber = Fiber{};
    fiber.index = n;
    fiber.block = index, fiber.blocks = launch_.grid;
    fiber.home = this;
    fiber.stack = stacks_.of(n);
    fiber.context.start(fiber.stack, Stacks::kBytes, body);
  }
  returned_ = 0;
  u32 patience = kPatience;
  while (returned_ < launch_.threads && !faulted_) {
    bool moved = false;
    if (seeded()) random_.shuffle(warp_order_);
    for (u32 warp : warp_order_) {
      // A warp goes on while it can, or in a random execution may be left at any of its collectives.
      while (!faulted_ && run_warp(warp)) {
        moved = true;
        if (seeded() && random_.next() % 4 == 0) break;
      }
      if (random_.next() % 4 == 0 && let_a_load_arrive()) moved = true;
    }
    if (moved) patience = kPatience;
    if (moved || faulted_ || let_a_load_arrive() || others_may_help(patience)) continue;
    faulted_ = true;
    message_ = "deadlock: " + who_waits_where();
  }
  if (faulted_) message_ = "block " + std::to_string(index) + ", " + message_;
  return !faulted_;
}

// Whether a fiber waits for another block; if so, gives that block's CPU thread time.
bool Block::others_may_help(u32& patience) const {
  const bool any = std::any_of(fibers_.begin(), fibers_.end(), [](const Fiber& fiber) {
    return fiber.state == Fiber::kWaiting && fiber.ready && fiber.elsewhere;
  });
  if (!any || patience-- == 0) return false;
  std::this_thread::sleep_for(std::chrono::microseconds(100));
  return true;
}

// Gives every lane that can run its turn; whether there was one.
bool Block::run_warp(u32 warp) {
  bool moved = false;
  if (seeded()) random_.shuffle(lane_order_);
  for (u32 lane : lane_order_) {
    Fiber& fiber = fibers_[warp * 32 + lane];
    if (fiber.state == Fiber::kWaiting && fiber.ready && fiber.ready(fiber.subject)) fiber.state = Fiber::kRunnable;
    if (fiber.state != Fiber::kRunnable) continue;
    moved = true;
    resume(fiber);
    if (faulted_) break;
  }
  return moved;
}

void Block::resume(Fiber& fiber) {
  self = &fiber;
  switch_stacks(scheduler_, fiber.context, &scheduler_fake_, fiber.stack, Stacks::kBytes);
  arrived(scheduler_fake_, nullptr, nullptr);
  self = nullptr;
}

void Block::leave() {
  Fiber& fiber = current();
  switch_stacks(fiber.context, scheduler_, &fiber.fake, scheduler_stack_, scheduler_stack_bytes_);
  arrived(fiber.fake, nullptr, nullptr);
}

void Block::body() {
  Fiber& fiber = static_cast<Fiber&>(*self);
  Block& block = *fiber.home;
  arrived(nullptr, &block.scheduler_stack_, &block.scheduler_stack_bytes_);
  cupyflash_emulate_entry(block.launch_.arguments);
  fiber.state = Fiber::kReturned;
  ++block.returned_;
  block.leave();
}

void Block::wait(Site site) {
  Fiber& fiber = current();
  fiber.site = site;
  fiber.state = Fiber::kWaiting;
  leave();
}

static bool same(const Site& a, const Site& b) {
  return a.line == b.line && std::strcmp(a.word, b.word) == 0 && std::strcmp(a.file, b.file) == 0;
}

// Counts the fiber in; it must have come to the place where the others wait.
void Block::join(Meeting& meeting, Site site) {
  if (meeting.here != 0 && !same(meeting.site, site)) {
    const std::string others = who_waits_where();
    emulate::fault("calls %s (%s:%d) while others wait: %s", site.word, site.file, site.line, others.c_str());
  }
  meeting.site = site;
  ++meeting.here;
}

void Block::release(u32 first, u32 count) {
  for (u32 n = first; n < first + count; ++n) fibers_[n].state = Fiber::kRunnable;
}

void Block::wait_for_block(Site site) {
  join(barrier_, site);
  if (barrier_.here < launch_.threads) return wait(site);
  barrier_.here = 0;
  races_.order_all();
  release(0, launch_.threads);
}

void Block::wait_for_warp(Site site, void* record, void (*complete)(void* const*)) {
  const u32 number = current().index / 32;
  Warp& warp = warps_[number];
  join(warp.meeting, site);
  warp.records[current().index % 32] = record;
  if (warp.meeting.here < 32) return wait(site);
  warp.meeting.here = 0;
  complete(warp.records);
  release(number * 32, 32);
}

void Block::wait_for_warp_in_order(Site site) {
  struct Record { Block& block; u32 thread; } record{*this, current().index};
  wait_for_warp(site, &record, [](void* const* records) {
    Block& block = static_cast<Record*>(records[0])->block;
    if (!block.launch_.checked) return;
    Clock clock;
    for (u32 lane = 0; lane < 32; ++lane) block.races_.give(static_cast<Record*>(records[lane])->thread, clock);
    for (u32 lane = 0; lane < 32; ++lane) block.races_.take(static_cast<Record*>(records[lane])->thread, clock);
  });
}

void Block::meet_at_named(Site site, u32 id, u32 count, bool stays) {
  if (id >= 16) emulate::fault("%s (%s:%d): there are 16 barriers, got %u", site.word, site.file, site.line, id);
  Named& named = named_[id];
  if (named.here != 0 && named.count != count) {
    emulate::fault("%s (%s:%d): barrier %u waits for %u threads, this call says %u", site.word, site.file, site.line,
                   id, named.count, count);
  }
  named.count = count;
  if (launch_.checked) races_.give(current().index, named.clock);
  if (stays) named.waiting.push_back(current().index);
  if (++named.here < count) return stays ? wait(site) : void();
  for (u32 thread : named.waiting) {
    if (launch_.checked) races_.take(thread, named.clock);
    fibers_[thread].state = Fiber::kRunnable;
  }
  named = {};
}

void Block::wait_until(Site site, bool (*ready)(const void*), const void* subject, bool elsewhere) {
  current().ready = ready;
  current().elsewhere = elsewhere;
  current().subject = subject;
  if (!ready(subject)) wait(site);
  current().ready = nullptr;
}

char* Block::shared_memory(u64 bytes) {
  if (bytes > launch_.shared_bytes) {
    emulate::fault("uses %llu bytes of shared memory, the launch gives %u", bytes, launch_.shared_bytes);
  }
  return shared_;
}

void Block::publish(const void* key) {
  if (launch_.checked) races_.give(current().index, published_[key]);
}

void Block::observe(const void* key) {
  if (launch_.checked) races_.take(current().index, published_[key]);
}

void Block::put_off(u32 to, const void* elements, u32 bytes) {
  Copy copy{to, bytes, current().group, {}};
  std::memcpy(copy.elements, elements, bytes);
  current().copies.push_back(copy);
}

bool Block::take_up(u32 pending, u32* to, void* elements, u32* bytes) {
  Fiber& fiber = current();
  if (fiber.copies.empty() || fiber.copies.front().group + pending >= fiber.group) return false;
  const Copy copy = fiber.copies.front();
  fiber.copies.pop_front();
  *to = copy.to;
  *bytes = copy.bytes;
  std::memcpy(elements, copy.elements, copy.bytes);
  return true;
}

void Block::arrive_later(u32 to, u32 bytes, void* bar, void (*arrived)(void*, i32)) {
  if (!seeded()) return arrived(bar, i32(bytes));
  loads_.push_back({to, std::string(shared_ + to, bytes), bar, arrived});
  std::memset(shared_ + to, 0xff, bytes);
}

// Any of those on their way; whether there was one.
bool Block::let_a_load_arrive() {
  if (loads_.empty()) return false;
  std::swap(loads_[random_.next() % loads_.size()], loads_.back());
  const Load load = std::move(loads_.back());
  loads_.pop_back();
  std::memcpy(shared_ + load.to, load.bytes.data(), load.bytes.size());
  load.arrived(load.bar, i32(load.bytes.size()));
  return true;
}

void Block::fault(const char* format, va_list arguments) {
  char text[2048];
  std::vsnprintf(text, sizeof text, format, arguments);
  message_ = "thread " + std::to_string(current().index) + ": " + text;
  faulted_ = true;
  leave();
  std::abort();     // nobody resumes a block that has failed
}

// "threads 0-30 wait at shuffle_xor (a.cu:3); threads 31, 40 have returned"
std::string Block::who_waits_where() const {
  std::vector<std::pair<std::string, std::string>> groups;      // what they do, who they are
  u32 run_begin = 0;
  auto doing = [](const Fiber& fiber) -> std::string {
    if (fiber.state == Fiber::kReturned) return "returned";
    if (fiber.state == Fiber::kRunnable) return "on the way";
    return std::string("at ") + fiber.site.word + " (" + fiber.site.file + ":" + std::to_string(fiber.site.line) + ")";
  };
  for (u32 n = 1; n <= fibers_.size(); ++n) {
    const std::string now = doing(fibers_[run_begin]);
    if (n < fibers_.size() && doing(fibers_[n]) == now) continue;
    std::string run = std::to_string(run_begin) + (n - 1 > run_begin ? "-" + std::to_string(n - 1) : "");
    auto group = std::find_if(groups.begin(), groups.end(), [&](auto& entry) { return entry.first == now; });
    if (group == groups.end()) groups.emplace_back(now, run);
    else group->second += ", " + run;
    run_begin = n;
  }
  std::string text;
  for (auto& [what, who] : groups) text += (text.empty() ? "threads " : "; threads ") + who + " " + what;
  return text;
}

}  // namespace emulate
