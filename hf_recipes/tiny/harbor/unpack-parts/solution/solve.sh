#!/bin/bash
tar -xf parts.tar
