#!/bin/bash
sort events.log > sorted.log
