// The change of stack. Registers that a called function must keep go on the stack; the rest is dead here.
#include "fiber.hpp"

#if defined(__x86_64__)
asm(R"(
.text
.hidden cupyflash_switch
.globl cupyflash_switch
.type cupyflash_switch, @function
cupyflash_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cupyflash_switch, .-cupyflash_switch
)");
#endif
