/* Functions of board.c. */
#ifndef BOARD_H
#define BOARD_H

#include <stdint.h>

int32_t board_main(void); /* the program; returns its exit code */

void board_write(const char *text);
int32_t board_command_line(char *to, uint32_t size);
int32_t board_open(const char *name); /* -1: cannot be opened */
uint32_t board_read(int32_t file, void *to, uint32_t size);
void board_start_timer(void);
uint32_t board_ticks(void); /* since the start; 24 bits */
void board_leave(int32_t code);

#endif
